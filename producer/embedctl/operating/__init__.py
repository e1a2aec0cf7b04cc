"""What operators use: a local stack, checks, the access list, metrics and the dashboard. No job needs it."""
