"""What a fault is: it breaks something now and says how it is mended later."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.monitor import Monitor
from tests.chaos.producers import Producers
from tests.chaos.recovery import Loss, Recoveries
from tests.chaos.stack import WIDE, Stack, Worker

#: Mends a fault; seconds after which to call it again, or None when it is done.
Undo = Callable[[], float | None]


@dataclass(frozen=True)
class Struck:
    """A fault that was done: in words, when it is mended, and how.

    Attributes:
        quiet_for: nothing else is broken until these are taken up.
        lull_s: nothing was done yet: nothing else is to be broken until it can be, but not for longer than this.
    """

    words: str
    after_s: float = 0.0
    undo: Undo | None = None
    quiet_for: tuple[Loss, ...] = ()
    lull_s: float = 0.0


@dataclass
class Chaos:
    """What faults may break, and the dice."""

    stack: Stack
    producers: Producers
    monitor: Monitor
    recoveries: Recoveries
    rng: random.Random
    #: Undos that are not done yet.
    pending: int = 0
    notes: list[str] = field(default_factory=list)
    #: Exit statuses of sick workers that left by themselves.
    sick_ends: list[int] = field(default_factory=list)

    @property
    def lease(self) -> float:
        return self.stack.options.lease

    @property
    def redis_well(self) -> bool:
        return self.stack.redis_up and not self.stack.redis_full

    def short(self) -> float:
        """How long a thing that comes back stays away (seconds)."""
        return self.rng.uniform(0.5, 6.0)


#: Breaks something, or returns None where it can't at this moment.
Strike = Callable[[Chaos], Struck | None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault: how often it is drawn, and for how many leases it does not come after which others.

    Attributes:
        rests_after: how the names of those others begin.
    """

    name: str
    weight: int
    strike: Strike
    rest_leases: float = 0.0
    rests_after: str = ""


def a_worker(chaos: Chaos, *, busy: bool = True) -> tuple[Worker, str] | None:
    """A live worker and its instance; one that holds a chunk, if that matters."""
    rows = chaos.stack.rows()
    held = chaos.stack.holdings() if busy else {}
    found = [
        (worker, rows[worker.pid].instance)
        for worker in chaos.stack.workers
        # The worker of the wide class is let live: tried with care, its one large chunk takes longer than the next
        # kill is away.
        if worker.hardware != WIDE
        and worker.alive
        and not worker.frozen
        and worker.pid in rows
        and (not busy or rows[worker.pid].instance in held)
    ]
    return chaos.rng.choice(found) if found else None
