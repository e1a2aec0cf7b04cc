"""The process: its paths, its connections, its start and its end."""
