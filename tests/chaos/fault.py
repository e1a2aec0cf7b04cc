"""The fault types. A fault breaks something now and says how to mend it later."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from embedctl.sweeper import Sweeper
from tests.chaos.monitor import Monitor
from tests.chaos.producers import Producers
from tests.chaos.recovery import Loss, Recoveries
from tests.chaos.stack import WIDE, Stack, Worker

#: Mends a fault. Returns the seconds after which to call it again, or None when it is done.
Undo = Callable[[], float | None]


@dataclass(frozen=True)
class Struck:
    """A fault that struck: its description, when it is mended, and how.

    Attributes:
        quiet_for: nothing else is broken until these chunks are taken up.
        lull_s: not 0 if the fault could not strike yet. Nothing else is broken until it can, for at most this long.
    """

    words: str
    after_s: float = 0.0
    undo: Undo | None = None
    quiet_for: tuple[Loss, ...] = ()
    lull_s: float = 0.0


@dataclass
class Chaos:
    """Everything that faults may break, and the random numbers."""

    stack: Stack
    producers: Producers
    monitor: Monitor
    recoveries: Recoveries
    rng: random.Random
    #: Number of undos that are not done yet.
    pending: int = 0
    notes: list[str] = field(default_factory=list)
    #: Exit statuses of sick workers that ended without a signal from the harness.
    sick_ends: list[int] = field(default_factory=list)
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


def a_worker(chaos: Chaos, *, busy: bool = True) -> tuple[Worker, str] | None:
    """A random live worker and its instance. With `busy`, a worker that holds a chunk."""
    rows = chaos.stack.rows()
    held = chaos.stack.holdings() if busy else {}
    found = [
        (worker, rows[worker.pid].instance)
        for worker in chaos.stack.workers
        # The worker of the wide class is spared: tried with care, its one large chunk takes longer than the time to
        # the next kill.
        if worker.hardware != WIDE
        and worker.alive
        and not worker.frozen
        and worker.pid in rows
        and (not busy or rows[worker.pid].instance in held)
    ]
    return chaos.rng.choice(found) if found else None
