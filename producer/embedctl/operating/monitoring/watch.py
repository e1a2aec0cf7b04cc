"""Sweeps over the active jobs again and again, adds up what waits in bounded memory, and keeps the last complete
sweep."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Generic, TypeVar

from embedctl.queueing.broker import Broker
from embedctl.queueing.chunk_sizes import BYTES_PER_TOKEN
from embedctl.store.backlog import START, Place, WaitingJob, check_access, read_slice
from embedctl.store.quotas import Quota
from embedctl_config import keys
from embedctl_config.errors import BrokerUnavailable

#: The label of everything beyond the most sets of labels. No name of a tenant or a lane has brackets.
OTHERS = "(others)"
#: Most queues, and most tenants, that are told apart while adding up.
_MOST_QUEUES, _MOST_TENANTS = 1_000, 10_000
#: Most tenants that are shown.
TENANTS_SHOWN = 100

K = TypeVar("K", bound=Hashable)
log = logging.getLogger(__name__)

#: A sweep begins at most this often (seconds).
INTERVAL_S = 5.0
#: A round of a sweep begins no further slice after this; the next round follows after a pause (seconds).
BUDGET_S, PAUSE_S = 1.0, 0.5
#: A sweep that has not moved for this long (seconds) does more than wait for Redis, whose timeouts and retries are
#: shorter.
STUCK_AFTER_S = 300.0
#: A sweep is too old after this many times its duration, but not before :data:`STUCK_AFTER_S`.
_OLD = 3
#: Most queues with live workers that are told apart.
_MOST_SERVED = 1_000


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


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a complete sweep found: what waits, the live workers by hardware class and model, and at most
    :data:`TENANTS_SHOWN` tenants that have limits; of the memory, what Redis uses and its maxmemory (bytes). It `began`
    at a moment of the monotonic clock (seconds), `now_ms` by
    Redis' clock, and took `took_s` seconds, pauses included."""

    backlog: Backlog
    alive: Mapping[tuple[str, str], int]
    quotas: Sequence[Quota]
    memory: tuple[int, int]
    began: float
    took_s: float
    now_ms: int


class Watch:
    """Looks at Redis in a thread of its own. It is also the health of the process. `now` is the monotonic clock
    (seconds)."""

    def __init__(self, broker: Broker, *, now: Callable[[], float] = time.monotonic) -> None:
        self._broker = broker
        self._now = now
        self._moved_at, self._reached_at = now(), -math.inf
        self._trouble = ""
        self._last: Sweep | None = None
        self._stopping = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="backlog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more. A call that waits for Redis is left behind."""
        self._stopping.set()

    def wait(self) -> None:
        """Block until it is stopped; raises NotPermitted if Redis' access list does not permit its user to look."""
        self._stopping.wait()
        if self._failed is not None:
            raise self._failed

    @property
    def reaches_redis(self) -> bool:
        """Whether the last call was answered, and lately."""
        return not self._trouble and self._silent_s() <= keys.HEARTBEAT_TTL_S

    def sweep(self) -> Sweep | None:
        """The last complete sweep; None before the first, if Redis has been silent since, or if it is too old."""
        last = self._last
        if last is None or self._silent_s() > keys.HEARTBEAT_TTL_S:
            return None
        return last if self.age_s(last) <= max(STUCK_AFTER_S, _OLD * last.took_s) else None

    def age_s(self, sweep: Sweep) -> float:
        return self._now() - sweep.began

    def illness(self) -> str:
        if not self._thread.is_alive():
            return "the sweep over the jobs has ended"
        if (still_s := self._now() - self._moved_at) > STUCK_AFTER_S:
            return f"the sweep over the jobs has not moved for {still_s:.0f} s"
        return ""

    def hindrance(self) -> str:
        if illness := self.illness():
            return illness
        if self._last is None:
            return self._trouble or "the first sweep over the jobs is not complete"
        if (silent_s := self._silent_s()) > keys.HEARTBEAT_TTL_S:
            return f"Redis has not answered for {silent_s:.0f} s"
        if self.sweep() is None:
            return self._trouble or "the last complete sweep over the jobs is too old"
        return ""

    def _silent_s(self) -> float:
        return self._now() - self._reached_at

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                began = self._now()
                self.look()
                self._stopping.wait(max(PAUSE_S, began + INTERVAL_S - self._now()))
        except Exception as error:  # noqa: BLE001  (raised where the process waits)
            self._failed = error
            self._stopping.set()

    def look(self) -> None:
        """Do one sweep. One that Redis does not answer to its end is given up. Raises NotPermitted if Redis' access
        list does not permit its user to look."""
        try:
            sweep = self._sweep()
        except BrokerUnavailable as error:
            if str(error) != self._trouble:
                log.warning("%s", error)
            self._moved_at, self._trouble = self._now(), str(error)
            return
        if sweep is not None:
            self._last = sweep

    def _sweep(self) -> Sweep | None:
        """A complete sweep; None if it was stopped."""
        began, now_ms = self._now(), self._broker.connection.now_ms()
        check_access(self._broker.connection)
        backlog = Backlog()
        place: Place | None = START
        until = began + BUDGET_S
        while place is not None:
            found = read_slice(self._broker.connection, place)
            backlog.add(found.jobs, found.unreadable)
            place = found.next
            self._answered()
            if place is not None and self._now() >= until:
                if self._stopping.wait(PAUSE_S):
                    return None
                until = self._now() + BUDGET_S
        alive, memory = self._alive(), self._broker.connection.memory_bytes()
        self._answered()
        quotas = self._broker.quotas.all(TENANTS_SHOWN)
        return Sweep(backlog, alive, quotas, memory, began, self._now() - began, now_ms)

    def _answered(self) -> None:
        self._moved_at = self._reached_at = self._now()
        self._trouble = ""

    def _alive(self) -> Counter[tuple[str, str]]:
        alive: Counter[tuple[str, str]] = Counter()
        for worker in self._broker.workers.alive():
            for model in worker.models:
                if (worker.hardware, model) in alive or len(alive) < _MOST_SERVED:
                    alive[worker.hardware, model] += 1
        return alive
