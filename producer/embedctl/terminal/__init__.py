"""What a person sees in a terminal: tables, pictures of a job, progress. Programs get JSON instead."""
