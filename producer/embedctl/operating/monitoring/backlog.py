"""Adds up what waits, over all active jobs, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Generic, TypeVar

from embedctl.queueing.chunk_sizes import BYTES_PER_TOKEN
from embedctl.store.backlog import WaitingJob

#: The label of everything beyond the most sets of labels. No name of a tenant or a lane has brackets.
OTHERS = "(others)"
#: Most queues, and most tenants, that are told apart while adding up.
_MOST_QUEUES, _MOST_TENANTS = 1_000, 10_000
#: Most tenants that are shown.
TENANTS_SHOWN = 100

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Total:
    """What waits of several jobs that have not ended: `chunks` added and not yet encoded, of `size` bytes. `opened_ms`
    is when the oldest job with such chunks was made or opened again, infinite if there is none; `progressed_ms` is the
    last progress of the one that has stood still longest."""

    jobs: int = 0
    chunks: int = 0
    size: int = 0
    opened_ms: float = math.inf
    progressed_ms: float = math.inf

    @property
    def tokens(self) -> float:
        """The tokens in its bytes, estimated."""
        return self.size / BYTES_PER_TOKEN

    def add(self, other: Total) -> None:
        self.jobs += other.jobs
        self.chunks += other.chunks
        self.size += other.size
        self.opened_ms = min(self.opened_ms, other.opened_ms)
        self.progressed_ms = min(self.progressed_ms, other.progressed_ms)


class _Totals(Generic[K]):
    """Totals of a limited number of keys; those of all other keys are added up under one."""

    def __init__(self, most: int, others: K) -> None:
        self._most, self._others = most, others
        self.by_key: dict[K, Total] = {}

    def add(self, key: K, total: Total) -> None:
        if key not in self.by_key and len(self.by_key) >= self._most:
            key = self._others
        self.by_key.setdefault(key, Total()).add(total)

    def largest(self, most: int) -> dict[K, Total]:
        """Those with the most bytes; the rest as one."""
        named = [key for key in self.by_key if key != self._others]
        shown = set(nlargest(most, named, key=lambda key: self.by_key[key].size))
        found = _Totals(most + 1, self._others)
        for key, total in self.by_key.items():
            found.add(key if key in shown else self._others, total)
        return found.by_key


#: Hardware class, model, lane.
Queued = tuple[str, str, str]


@dataclass(slots=True)
class Backlog:
    """What waits, added up job by job; `unreadable` are jobs whose facts can't be read, or are of another version."""

    unreadable: int = 0
    _queues: _Totals[Queued] = field(default_factory=lambda: _Totals(_MOST_QUEUES, (OTHERS, OTHERS, OTHERS)))
    _tenants: _Totals[str] = field(default_factory=lambda: _Totals(_MOST_TENANTS, OTHERS))

    def add(self, jobs: Collection[WaitingJob], unreadable: int = 0) -> None:
        self.unreadable += unreadable
        for job in jobs:
            since = (job.opened_ms, job.progressed_ms) if job.chunks else ()
            total = Total(1, job.chunks, job.size, *since)
            self._queues.add((job.hardware, job.model, job.lane), total)
            self._tenants.add(job.tenant, total)

    @property
    def queues(self) -> Mapping[Queued, Total]:
        return self._queues.by_key

    def tenants(self) -> Mapping[str, Total]:
        """Totals of the tenants with the most bytes, at most :data:`TENANTS_SHOWN`; the rest under :data:`OTHERS`."""
        return self._tenants.largest(TENANTS_SHOWN)
