"""The fault types. A fault breaks something now and says how to mend it later."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field

from embedctl.queueing.sweeper import Sweeper
from tests.chaos.monitor import Monitor
from tests.chaos.producers import Producers
from tests.chaos.stack import Stack, Worker

#: Mends a fault. Returns the seconds after which to call it again, or None when it is done.
Undo = Callable[[], float | None]


@dataclass(frozen=True)
class Struck:
    """A fault that struck: its description, when it is mended, and how."""

    words: str
    after_s: float = 0.0
    undo: Undo | None = None


@dataclass
class Chaos:
    """Everything that faults may break, and the random numbers."""

    stack: Stack
    producers: Producers
    monitor: Monitor
    rng: random.Random
    notes: list[str] = field(default_factory=list)
    #: Exit statuses of sick workers that ended without a signal from the harness.
    sick_ends: list[int] = field(default_factory=list)
    #: Jobs of which a delivery into a database was begun.
    delivered: set[str] = field(default_factory=set)
    #: Jobs whose drainers were killed. A delivery of one would take its vectors out of Redis, whose count is wanted.
    drained: set[str] = field(default_factory=set)
    #: Processes of `embedctl up` that were killed at their moment.
    guarded_kills: int = 0
    #: How often the tenant of jobs that kill was seen to be distrusted.
    distrusts: int = 0
    #: Removes what nobody needs from the place outside of Redis, once it was asked to.
    sweeper: Sweeper | None = None

    @property
    def lease(self) -> float:
        return self.stack.options.lease

    @property
    def redis_well(self) -> bool:
        return self.stack.redis_up and not self.stack.redis_full

    def short(self) -> float:
        """How long a temporary fault lasts (seconds)."""
        return self.rng.uniform(0.5, 6.0)


#: Breaks something, or returns None if it can't do so now.
Strike = Callable[[Chaos], Struck | None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        weight: how often it is drawn.
        rest_leases: for how many leases it is not drawn after certain other faults.
        rests_after: the prefix of those other faults' names.
    """

    name: str
    weight: int
    strike: Strike
    rest_leases: float = 0.0
    rests_after: str = ""


def killed_later(process: subprocess.Popen[bytes], words: str, after_s: float) -> Struck:
    """A process that was started, and is killed then."""

    def kill() -> None:
        process.kill()
        process.wait()

    return Struck(words, after_s, kill)


def a_worker(chaos: Chaos, *, busy: bool = True) -> Worker | None:
    """A random live worker. With `busy`, one that holds a chunk."""
    rows = chaos.stack.rows()
    owners = chaos.stack.owners() if busy else set()
    found = [
        worker
        for worker in chaos.stack.workers
        if worker.alive
        and not worker.frozen
        and worker.pid in rows
        and (not busy or rows[worker.pid].instance in owners)
    ]
    return chaos.rng.choice(found) if found else None
