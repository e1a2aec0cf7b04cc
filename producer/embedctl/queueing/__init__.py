"""How chunks get to workers: the connection that all share, cuts and routes.

What was lost is found here (`reaper`), and what nothing needs is removed (`sweeper`)."""
