"""Tickets: the Celery messages that say "look at chunk i of job J"."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Celery
from kombu.exceptions import KombuError, OperationalError

from embedctl_config import keys
from embedctl_config.celery_app import TASK
from embedctl_config.errors import BrokerUnavailable

#: Most tickets published in one round trip.
_BATCH = 500


def in_words(job_id: str, chunk: int | str) -> str:
    """What a ticket asks for, as people see it."""
    return f"job {job_id}, chunk {chunk}"


def task_in_words(task_id: str) -> str | None:
    """The same by the id of a ticket's Celery task; None where it is no ticket's."""
    job_id, _, rest = task_id.partition(".")
    chunk, dot, _ = rest.partition(".")
    return in_words(job_id, chunk) if dot and chunk.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A message that says "look at this chunk".

    Attributes:
        facts: `version`, `sent_ms` (when it was first sent), and whatever a later version adds.
    """

    queue: str
    job_id: str
    chunk: int
    facts: Mapping[str, Any]

    @property
    def route(self) -> str:
        """Who is to answer it, in words."""
        hardware, model = keys.of_queue(self.queue)
        return f"class {hardware}, model {model}"


class TicketSender:
    """Publishes tickets in batches. A ticket that is lost or doubled is harmless: the store knows better.

    Args:
        clock: Redis' own time in ms, about; tickets bear it, so that people see how long they have waited.
    """

    def __init__(self, app: Celery, clock: Callable[[], int]) -> None:
        self._app = app
        self._clock = clock

    def send(self, queue: str, job_id: str, chunks: Sequence[int], *, version: int) -> None:
        """Publish one ticket a chunk.

        Args:
            version: the job's, so that a worker which knows it takes the ticket, and an older one sends it on.

        Raises:
            BrokerUnavailable: Redis can't be reached, and some may not have been sent; the reaper sends them later.
        """
        if chunks:
            facts = {"version": version, "sent_ms": self._clock()}
            self.forward([Ticket(queue, job_id, chunk, facts) for chunk in chunks])

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
                        argsrepr=in_words(ticket.job_id, ticket.chunk),
                        kwargsrepr=ticket.route,
                    )
        except (KombuError, OperationalError, OSError) as error:
            raise BrokerUnavailable(f"tickets can't be sent: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._app.close()
