"""Forgets the queues that no job uses any more: bells that nobody hears, and kombu's bindings.

Only queues without a live worker are tidied; a worker rings for itself when it comes. Bells go straight to the list of
their queue's name, so nobody misses a binding, not even a worker that begins to consume the queue at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from embedctl.store.connection import Connection
from embedctl.store.sweeps import next_slice
from embedctl_config import keys
from embedctl_config.errors import BrokerRefused, NotPermitted

#: Queues that are looked at in one round.
_QUEUES = 100


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
            unserved = self._tidy(list(marks), now_ms)
            self._forget([queue for queue in unserved if now_ms - marks[queue] > keys.QUEUE_KEPT_S * 1000])

    def _tidy(self, queues: Sequence[str], now_ms: int) -> list[str]:
        """Remove the bells of the queues that have no live worker; returns these queues."""
        live = self._connection.ask_each(
            queues, lambda pipe, queue: pipe.zcount(keys.queue_workers(queue), now_ms, "+inf"), refusals=True
        )
        unserved = [queue for queue, count in zip(queues, live, strict=True) if count == 0]
        # A key of another type belongs to another program.
        self._connection.ask_each(unserved, lambda pipe, queue: pipe.ltrim(queue, 1, 0), refusals=True)
        return unserved

    def _forget(self, queues: Sequence[str]) -> None:
        """Forget queues that have been empty, and without jobs, for long."""
        if queues:
            with self._connection.client() as client:
                pipe = client.pipeline(transaction=False).zrem(keys.QUEUES, *queues)
                pipe.unlink(*bindings(queues)).execute()


def bindings(queues: Iterable[str]) -> list[str]:
    """Kombu's keys that describe these queues."""
    return [f"{table}.{queue}" for queue in queues for table in keys.BINDINGS]
