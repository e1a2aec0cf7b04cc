"""Adds chunks to a job, and waits for what comes of them. It never waits for what cannot happen."""
