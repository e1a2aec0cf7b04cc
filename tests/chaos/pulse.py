"""Finds healthy workers that were silent for too long or judged dead, although no fault of the harness explains it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from embedctl_config import keys
from tests.chaos.stack import Stack, Watch, Worker
from tests.chaos.storm import Event

#: Prefixes of faults that disturb every heartbeat. Other faults disturb only the worker that they name.
_DISTURBING = ("connections", "Redis", "link")
#: After a disturbance, a worker may need this long to be heard again (seconds).
_GRACE_S = 20.0


@dataclass(eq=False)
class Silence:
    """A live worker whose heartbeat did not count for some time."""

    worker: int
    instance: str
    began_at: float
    ended_at: float
    seconds: float = 0.0


@dataclass
class Pulse(Watch):
    """Watches the heartbeats of the harness' own workers, in a thread.

    Attributes:
        silences: silences of processes that were alive, not stopped, and had been sent no signal.
        accused: live processes that somebody reported as dead.
    """

    stack: Stack
    silences: list[Silence] = field(default_factory=list)
    accused: set[str] = field(default_factory=set)
    _known: dict[str, tuple[Worker, int]] = field(default_factory=dict)
    _open: dict[str, Silence] = field(default_factory=dict)

    def look(self) -> None:
        """Check all heartbeats once."""
        rows = self.stack.rows()
        for worker in list(self.stack.workers):
            if worker.pid in rows:
                self._known[rows[worker.pid].instance] = (worker, worker.pid)
        for instance, (worker, pid) in list(self._known.items()):
            if worker.pid != pid:
                del self._known[instance]
                self._open.pop(instance, None)
                continue
            pipe = self.stack.raw.pipeline(transaction=False).time().zscore(keys.WORKERS, instance)
            (seconds, micros), until_ms, died = pipe.get(keys.died(instance)).execute()
            healthy = worker.pid == pid and worker.alive and not worker.frozen and not worker.doomed
            if not healthy or until_ms is None:
                self._open.pop(instance, None)
                continue
            if died is not None and died.decode() != keys.LEFT:
                self.accused.add(f"worker {worker.number} ({instance}): {died.decode()}")
            self._note(worker.number, instance, seconds + micros / 1e6 - until_ms / 1000)

    def _note(self, number: int, instance: str, silent_s: float) -> None:
        now = time.monotonic()
        if silent_s <= 0:
            self._open.pop(instance, None)
            return
        if instance not in self._open:
            self._open[instance] = Silence(number, instance, now - silent_s, now)
            self.silences.append(self._open[instance])
        self._open[instance].ended_at, self._open[instance].seconds = now, silent_s


def unexplained(silences: Iterable[Silence], events: Iterable[Event], restarts: Iterable[float]) -> list[Silence]:
    """The silences that no fault explains, neither one that affects all workers nor one of that worker alone."""
    events, restarts = list(events), list(restarts)
    return [silence for silence in silences if not _explained(silence, events, restarts)]


def _explained(silence: Silence, events: list[Event], restarts: list[float]) -> bool:
    # The worker's last heartbeat came one heartbeat TTL before the silence began.
    begin, end = silence.began_at - keys.HEARTBEAT_TTL_S, silence.ended_at
    if any(begin <= at + _GRACE_S and at <= end for at in restarts):
        return True
    return any(
        (event.name.startswith(_DISTURBING) or re.match(rf"worker {silence.worker}\b", event.words))
        and event.began_at <= end
        and (event.ended_at is None or event.ended_at + _GRACE_S >= begin)
        for event in events
    )
