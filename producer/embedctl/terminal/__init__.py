"""What a person sees in a terminal: tables, pictures of a job, progress."""
