"""The process: its paths, its connections, its start and its end. The paths are one table."""
