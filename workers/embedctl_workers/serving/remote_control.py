"""Celery's remote control reduced to its queries: anyone who can query a worker still cannot command it."""

from __future__ import annotations

from celery.worker.control import Panel

#: What `celery inspect` and Flower ask. No query ends, changes or redirects a worker or its bells.
QUERIES = frozenset(
    """
    active active_queues clock conf enable_events heartbeat hello ping query_task registered report reserved revoked
    scheduled stats
    """.split()  # noqa: SIM905  (as a list it would be a screen of its own)
)


def remove_commands() -> None:
    """Remove all other remote commands from this process: SIGTERM stops a worker, `embedctl cancel` ends a job."""
    for command in set(Panel.data) - QUERIES:
        del Panel.data[command]
