"""How chunks get to workers: the connection that all share, cuts, routes and tickets.

What was lost is sent again here (`reaper`), and what nothing needs is removed (`sweeper`)."""
