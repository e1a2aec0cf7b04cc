"""Reads the queues: how many tickets wait, and since when.

People read these figures. The reaper reads only the oldest tickets, and a wrong figure does no harm there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from embedctl.store.connection import Connection
from embedctl_config import keys, wire

_SLICE = 100
#: The number of oldest tickets that show a queue's progress. One is not enough, because tickets may come back.
_OLDEST = 10
#: A ticket takes about 1 KB. A larger message comes from another program, and is not parsed (bytes).
_LARGEST_TICKET = 16 * 1024
#: Later than any clock shows (ms).
_LATEST_MS = 1 << 53


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many tickets wait in one queue, and the :func:`sent_ms` of the next one; None if there is none."""

    tickets: int
    sent_ms: int | None


@dataclass(frozen=True, slots=True)
class QueuedTicket:
    """A ticket that waits in a queue as this message; for its facts see :class:`~embedctl.queueing.tickets.Ticket`."""

    message: bytes
    job_id: str
    chunk: int
    facts: Mapping[str, Any]


class Queues:
    """The queues of tickets, which are Celery's lists. Methods raise BrokerUnavailable if Redis can't be reached."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def waiting(self, queues: Sequence[str]) -> list[Waiting]:
        """The waiting tickets of each of these queues, read in slices; none for a queue that does not exist."""
        found: list[Waiting] = []
        for at in range(0, len(queues), _SLICE):
            # Kombu pushes at the head and pops at the tail. It also puts unfinished tickets back at the tail.
            answers = self._connection.ask_each(
                queues[at : at + _SLICE], lambda pipe, queue: pipe.llen(queue).lindex(queue, -1)
            )
            found += [
                Waiting(tickets, None if ticket is None else sent_ms(ticket))
                for tickets, ticket in zip(answers[::2], answers[1::2], strict=True)
            ]
        return found

    def next_tickets(self, queue: str, most: int, *, now_ms: int) -> list[QueuedTicket]:
        """The tickets that would be taken next, which stay in their queue: at most one worker's share of all.

        Messages that are not tickets of this version are left out. The time is by about Redis' clock.
        """
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            waiting, workers = pipe.llen(queue).zcount(keys.queue_workers(queue), now_ms, "+inf").execute()
            share = -(-waiting // max(1, workers))
            for at in range(min(most, share)):
                pipe.lindex(queue, -1 - at)
            messages = pipe.execute()
        return [ticket for message in messages if message and (ticket := queued_ticket(message))]

    def remove(self, queue: str, tickets: Sequence[QueuedTicket]) -> None:
        """Remove tickets that are still in their queue, near its end."""
        self._connection.ask_each(tickets, lambda pipe, ticket: pipe.lrem(queue, -1, ticket.message))

    def oldest(self, queues: Sequence[str]) -> list[int | None]:
        """The send time of the oldest tickets in each of these queues, in ms by approximately Redis' clock.

        No older tickets are left in the queue, except those that came back. None for a queue that is short, or whose
        tickets do not say.
        """
        places = product(queues, range(_OLDEST + 1))
        answers = self._connection.ask_each(places, lambda pipe, at: pipe.lindex(at[0], -1 - at[1]))
        found: list[int | None] = []
        for at in range(0, len(answers), _OLDEST + 1):
            *oldest, another = answers[at : at + _OLDEST + 1]
            times = [_not_before_its_job(ticket) for ticket in oldest if another is not None]
            # The newest of them, because a forwarded ticket keeps its first send time.
            found.append(max((time for time in times if time is not None), default=None))
        return found


def _not_before_its_job(ticket: bytes) -> int | None:
    """When a ticket was sent, by its sender's clock, which may be wrong; never earlier than its job was made."""
    if (sent := sent_ms(ticket)) is None:
        return None
    try:
        return max(sent, keys.created_s(_body(ticket)[0][0]) * 1000)
    except (LookupError, TypeError, ValueError):
        return None  # not one of our tickets


def job_of(ticket: bytes) -> str | None:
    """The id of a ticket's job; None if this is not a ticket of this version."""
    found = queued_ticket(ticket)
    return None if found is None else found.job_id


def queued_ticket(message: bytes) -> QueuedTicket | None:
    """The ticket in a message; None if this is not a ticket of this version."""
    if len(message) > _LARGEST_TICKET:
        return None
    try:
        (job_id, chunk), facts, *_ = _body(message)
        known = keys.is_job_id(job_id) and facts["version"] == wire.VERSION
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return QueuedTicket(message, job_id, chunk, facts) if known else None


def _body(ticket: bytes) -> Any:
    """What is inside of a message in kombu's form, JSON around a body in base64: Celery's `[args, kwargs, …]`."""
    message: Any = json.loads(ticket)
    body = message["body"]
    if message["properties"]["body_encoding"] == "base64":
        body = base64.b64decode(body)
    return json.loads(body)


def sent_ms(ticket: bytes) -> int | None:
    """When a ticket was first sent, in ms by approximately Redis' clock; None if it does not say."""
    if len(ticket) > _LARGEST_TICKET:
        return None
    try:
        sent = _body(ticket)[1]["sent_ms"]
    except (ValueError, LookupError, TypeError, RecursionError):  # other programs may put anything into the queue
        return None
    return sent if type(sent) is int and 0 < sent < _LATEST_MS else None
