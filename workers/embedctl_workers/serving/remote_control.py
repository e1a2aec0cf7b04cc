"""Celery's remote control, cut down to its questions: who may ask workers something can't give them orders by that."""

from __future__ import annotations

from celery.worker.control import Panel

#: What `celery inspect` and Flower ask, and nothing that ends, changes or redirects a worker or its tickets.
QUESTIONS = frozenset(
    """
    active active_queues clock conf enable_events heartbeat hello ping query_task registered report reserved revoked
    scheduled stats
    """.split()  # noqa: SIM905  (as a list it would be a screen of its own)
)


def answer_questions_only() -> None:
    """Have this process' worker take no orders: SIGTERM stops it, and `embedctl cancel` ends a job."""
    for order in set(Panel.data) - QUESTIONS:
        del Panel.data[order]
