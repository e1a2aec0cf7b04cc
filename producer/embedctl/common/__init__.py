"""What every room may use: threads, processes and this machine. Nothing here knows what a job is."""
