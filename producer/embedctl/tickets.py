"""Tickets: the Celery messages that say "look at chunk i of job J"."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Celery
from kombu.exceptions import KombuError, OperationalError

from embedctl_config.celery_app import TASK
from embedctl_config.errors import BrokerUnavailable

#: Most tickets published in one round trip.
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Ticket:
    """A message that says "look at this chunk"; `facts` are its version and whatever a later version adds."""

    queue: str
    job_id: str
    chunk: int
    facts: Mapping[str, Any]


class TicketSender:
    """Publishes tickets in batches. A ticket that is lost or doubled is harmless: the store knows better."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def send(self, queue: str, job_id: str, chunks: Sequence[int], *, version: int) -> None:
        """Publish one ticket a chunk.

        Args:
            version: the job's, so that a worker which knows it takes the ticket, and an older one sends it on.

        Raises:
            BrokerUnavailable: Redis can't be reached, and some may not have been sent; the reaper sends them later.
        """
        self.forward([Ticket(queue, job_id, chunk, {"version": version}) for chunk in chunks])

    def forward(self, tickets: Sequence[Ticket]) -> None:
        """Publish tickets as they are, perhaps of another version than this.

        Raises:
            BrokerUnavailable: as for :meth:`send`.
        """
        if not tickets:
            return
        try:
            with self._app.producer_pool.acquire(block=True) as producer, producer.batch(_BATCH):  # type: ignore[attr-defined]  # new in kombu 5.7, not yet in its stubs
                for ticket in tickets:
                    self._app.send_task(
                        TASK,
                        args=(ticket.job_id, ticket.chunk),
                        kwargs=dict(ticket.facts),
                        queue=ticket.queue,
                        producer=producer,
                        # What an operator reads in Flower; the suffix keeps a ticket that is sent again apart.
                        task_id=f"{ticket.job_id}.{ticket.chunk}.{secrets.token_hex(3)}",
                    )
        except (KombuError, OperationalError, OSError) as error:
            raise BrokerUnavailable(f"tickets can't be sent: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._app.close()
