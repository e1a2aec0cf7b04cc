"""Removes the tickets of jobs that ended or are gone, and with them the queues that no job uses any more.

Workers take such tickets from the queues that they serve, so only queues without a live worker are tidied. A ticket is
removed by its exact content, and no two tickets are equal. So no ticket that is sent meanwhile can be removed, and no
step needs a lock. Redis deletes an empty list by itself.

Kombu's bindings are removed with the queue. Tickets go straight to the list of their queue's name, so nobody misses a
binding, neither a sender nor a worker that begins to consume the queue at that moment.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from embedctl.store.connection import Connection
from embedctl.store.queues import job_of
from embedctl.store.status import JobState
from embedctl.store.sweeps import next_slice
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerRefused, BrokerUnavailable, NotPermitted

log = logging.getLogger(__name__)

#: Queues that are looked at in one round.
_QUEUES = 100
#: The most tickets that are read in one round, about half a megabyte.
_TICKETS = 500


class UnusedQueues:
    """The queues that have had jobs, and what is left in them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def mark(self, queues: Iterable[str], now_ms: int) -> None:
        """Note that there is, or was just now, a job of each of these queues."""
        marks = dict.fromkeys(queues, now_ms)
        if marks:
            with self._connection.client() as client:
                pipe = client.pipeline(transaction=False).zadd(keys.QUEUES, marks, gt=True)
                pipe.pexpire(keys.QUEUES, keys.QUEUES_TTL_S * 1000).execute()

    def sweep(self, now_ms: int, in_use: Iterable[str]) -> None:
        """Mark the queues in use, and tidy the next ones. A process that may not do this leaves it to others."""
        with suppress(NotPermitted, BrokerRefused):
            self.mark(in_use, now_ms)
            marks = dict(next_slice(self._connection, keys.QUEUES, "queues", _QUEUES))
            empty = self._tidy(list(marks), now_ms)
            self._forget([queue for queue in empty if now_ms - marks[queue] > keys.QUEUE_KEPT_S * 1000])

    def leave(self, queue: str) -> None:
        """Tidy the queue of a job that was just removed. The reaper does what is left, if this fails too."""
        with suppress(NotPermitted, BrokerUnavailable):
            now_ms = self._connection.now_ms()
            self._tidy([queue], now_ms)
            self.mark([queue], now_ms)  # a full Redis refuses this

    def _tidy(self, queues: Sequence[str], now_ms: int) -> list[str]:
        """Remove some of the oldest tickets that nobody needs; returns the queues without tickets and workers."""
        oldest = self._oldest_of_unserved(queues, now_ms)
        first = {queue: job_of(ticket) for queue, ticket in oldest.items() if ticket is not None}
        over = self._over(first.values())
        # Tickets behind one that somebody needs wait until it is gone.
        left = [queue for queue, job_id in first.items() if job_id in over]
        self._remove_dead_tickets(left)
        return [queue for queue, ticket in oldest.items() if ticket is None]

    def _oldest_of_unserved(self, queues: Sequence[str], now_ms: int) -> dict[str, bytes | None]:
        """The oldest ticket, if there is one, of each queue that has no live worker."""
        answers = self._connection.ask_each(
            queues,
            lambda pipe, queue: pipe.lindex(queue, -1).zcount(keys.queue_workers(queue), now_ms, "+inf"),
            refusals=True,
        )
        heads = zip(queues, answers[::2], answers[1::2], strict=True)
        # A key of another type belongs to another program.
        return {queue: ticket for queue, ticket, live in heads if live == 0 and not isinstance(ticket, Exception)}

    def _remove_dead_tickets(self, queues: Sequence[str]) -> None:
        """Remove those of the oldest tickets in these queues whose jobs are over, and empty queues' bindings."""
        if not queues:
            return
        each = max(1, _TICKETS // len(queues))
        places = product(queues, range(each))
        answers = self._connection.ask_each(places, lambda pipe, at: pipe.lindex(at[0], -1 - at[1]), refusals=True)
        found = {
            queue: {ticket: job_of(ticket) for ticket in answers[at : at + each] if isinstance(ticket, bytes)}
            for queue, at in zip(queues, range(0, len(answers), each), strict=True)
        }
        self._remove(found, self._over({job_id for tickets in found.values() for job_id in tickets.values()}))

    def _remove(self, found: Mapping[str, Mapping[bytes, str | None]], over: Collection[str | None]) -> None:
        dead = [(queue, ticket) for queue, of in found.items() for ticket in of if of[ticket] in over]
        # LREM would search the whole list for a ticket that another process has removed meanwhile.
        places = self._connection.ask_each(dead, lambda pipe, at: pipe.lpos(*at, rank=-1, maxlen=_TICKETS))
        there = [each for each, place in zip(dead, places, strict=True) if place is not None]
        self._connection.ask_each(there, lambda pipe, at: pipe.lrem(at[0], -1, at[1]))
        for queue, count in Counter(queue for queue, _ in dead).items():
            log.info("queue %s: removed %d tickets of jobs that ended or are gone", queue, count)
        exist = self._connection.ask_each(found, lambda pipe, queue: pipe.exists(queue))
        if gone := [queue for queue, exists in zip(found, exist, strict=True) if not exists]:
            with self._connection.client() as client:
                client.unlink(*bindings(gone))

    def _over(self, job_ids: Iterable[str | None]) -> set[str | None]:
        """The jobs among these that are gone or have ended, so that their tickets do nothing."""
        ids = sorted({job_id for job_id in job_ids if job_id is not None})
        answers = self._connection.ask_each(
            ids, lambda pipe, job_id: pipe.hmget(keys.job(job_id), "state", "version"), refusals=True
        )
        return {job_id for job_id, facts in zip(ids, answers, strict=True) if _is_over(facts)}

    def _forget(self, queues: Sequence[str]) -> None:
        """Forget queues that have been empty, and without jobs, for long."""
        if queues:
            with self._connection.client() as client:
                pipe = client.pipeline(transaction=False).zrem(keys.QUEUES, *queues)
                pipe.unlink(*bindings(queues)).execute()


def _is_over(facts: Any) -> bool:
    """Whether a job with this state and version is gone or has ended."""
    if facts == [None, None]:
        return True
    try:
        state, version = facts
        return int(version) == wire.VERSION and JobState(state.decode()).ended
    except (ValueError, TypeError, AttributeError):
        return False


def bindings(queues: Iterable[str]) -> list[str]:
    """Kombu's keys that describe these queues."""
    return [f"{table}.{queue}" for queue in queues for table in keys.BINDINGS]
