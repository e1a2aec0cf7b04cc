"""A worker that serves a queue: its life, its tasks, its heartbeat and what it reports."""
