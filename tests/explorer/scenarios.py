"""Small worlds to explore: their actors, and what may go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedctl.store import JobStatus
from embedctl_config.tenants import TenantEntry
from tests.explorer import bodies
from tests.explorer.actors import Actor, Body, Program, Worker, result_of
from tests.explorer.bodies import corpus
from tests.explorer.faults import Fault, in_client_code, scripts_with
from tests.explorer.machine import Machine
from tests.explorer.world import State, World, a_world
from tests.support.store import MINE, OTHER, add, claim, new_job

#: A text that leaves no room for another.
LONG = "x" * 600


@dataclass(frozen=True)
class Scenario:
    """A small world.

    Attributes:
        actors: makes the actors.
        left: fault → how often it may happen.
        job: arguments of the job's creation, in addition to the defaults.
        limits: limits in addition to the defaults.
        prepare: brings the world to the first state.
    """

    actors: Callable[[], tuple[Actor, ...]]
    left: Mapping[str, int] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[World], None] = lambda world: None
    history: int = 4

    @contextmanager
    def machine(self, folder: Path, fault: Fault | None = None) -> Iterator[Machine]:
        """The machine of this scenario, in the Redis of this folder, with a fault in scripts and client code."""
        left = self.left if fault is None or fault.left is None else fault.left
        actors = tuple(actor for actor in self.actors() if fault is None or actor.name not in fault.without)
        with in_client_code(fault), a_world(folder, scripts=scripts_with(fault), job=self.job, **self.limits) as world:
            self.prepare(world)
            yield Machine(world, actors, dict(left), history=self.history)


def _nothing(status: JobStatus) -> None:
    """Keep nothing of a status: a producer and a waiter decide at once what to do, and forget it."""


def _size(status: JobStatus) -> Any:
    return status.chunks, status.original_chunks is None, status.sealed


def _age(status: JobStatus) -> Any:
    return status.sealed, status.progressed_at.year > 2000


def _reaper(name: str = "reaper", *, only_fair: bool = False, always_sweeps: bool = False) -> Program:
    """A reaper that looks at the job once it is due, and sweeps: perhaps always, so that much happens between steps."""

    def needed(world: World, state: State) -> tuple[str, ...]:
        views = world.views(state.snapshot)
        active = any(view.is_active for view in views)
        if not any(view.in_agenda for view in views):
            return ("sweeps",) if active else ()
        return ("looks", "sweeps") if always_sweeps and active else ("looks",)

    return Program(
        name=name,
        bodies={"looks": bodies.looks_after, "sweeps": bodies.sweeps},
        runs=0,
        mortal=True,
        obliged=True,
        begins=needed,
        before=World.come_up,
        only_fair=only_fair,
        sees=_age,
    )


def _producer(*words: str, runs: int = 1, others: Mapping[str, tuple[str, ...]] | None = None) -> Program:
    """A producer that may resume when it is over, with the same corpus or another."""
    variants = {"": bodies.submits(corpus(*words))}
    variants |= {name: bodies.submits(corpus(*other)) for name, other in (others or {}).items()}
    return Program("producer", variants, runs=runs, mortal=True, obliged=True, adds=True, sees=_nothing)


def _waiter() -> Program:
    return Program("waiter", {"": bodies.waits}, obliged=True, sees=_nothing)


def _canceller() -> Program:
    return Program("canceller", {"": bodies.cancels}, mortal=True, rare=True)


def _stopper(runs: int = 1) -> Program:
    return Program("stopper", {"": bodies.stops}, runs=runs, mortal=True, rare=True)


def _retrier(name: str = "retrier", runs: int = 1) -> Program:
    bodies_of: dict[str, Body] = {"": bodies.retries}
    return Program(name, bodies_of, rare=True, runs=runs, mortal=True, adds=True, sees=_size)


def _drainer(name: str = "drainer") -> Program:
    return Program(name, {"": bodies.drains}, runs=0, mortal=True, rare=True, sees=_size_and_state)


def _size_and_state(status: JobStatus) -> Any:
    return status.chunks, status.original_chunks, status.state.ended


def _limited(world: World, records: int = 3) -> None:
    """The job was made before its tenant's limits were stated: one waiting chunk."""
    world.broker.quotas.state("default", TenantEntry(max_waiting_records=records), by="w", since_ms=1)
    world.broker.quotas.round([(world.job_id, "default")])


def _limited_with_failures(world: World) -> None:
    _limited(world, records=100)
    _ended_with_failures(world)


def _submitted(world: World) -> None:
    """A sealed job of two chunks that nobody had."""
    for chunk in range(2):
        add(world.broker, world.job_id, chunk)
    world.broker.jobs.seal(world.job_id, 2)


def _encode(world: World, *failed: int, first: int = 0) -> None:
    """Encode the chunks from `first` on. So many records of each fail."""
    for chunk, failures in enumerate(failed, first):
        token = f"t{chunk}"
        found = claim(world.broker, world.job_id, chunk, token, instance="before")
        assert found is not None
        world.forget_given(token)
        payload, report = result_of(found.input, failures)
        assert world.broker.jobs.complete(world.job_id, chunk, token, payload, report, fingerprint=MINE) == "ok"


def _ended_with_failures(world: World) -> None:
    """A sealed job of two chunks. One record of each chunk failed; the producer is gone."""
    _submitted(world)
    _encode(world, 1, 1)


def _retried(world: World) -> None:
    """A sealed job of two chunks whose failed records were retried. The second chunk's record failed again."""
    _ended_with_failures(world)
    for chunk in range(2):
        assert world.broker.jobs.retry(world.job_id, chunk, 2 + chunk, "before") == 1
    world.broker.jobs.seal(world.job_id, 4)
    _encode(world, 0, 1, first=2)


def _beside_others(world: World) -> None:
    """Two jobs of other tenants in other lanes wait beside the job."""
    for tenant, lane in (("small", "interactive"), ("slow", "background")):
        world.others.append(new_job(world.broker, chunks=2, tenant=tenant, lane=lane))


def _after_a_death(world: World) -> None:
    """Two jobs are watched, because a worker died that had chunks of both."""
    for tenant in ("a", "b"):
        world.others.append(new_job(world.broker, chunks=2, tenant=tenant))
        world.watch(world.others[-1])


def _repairer() -> Program:
    """A producer that submits the corpus again after Redis lost a result."""

    def needed(world: World, state: State) -> tuple[str, ...]:
        return ("",) if state.lost else ()

    again = bodies.submits(corpus("text", "text"))
    return Program(
        name="producer", bodies={"": again}, mortal=True, obliged=True, adds=True, begins=needed, sees=_nothing
    )


SCENARIOS: dict[str, Scenario] = {
    # A worker fails records while the producer still submits. No error is allowed.
    "budget": Scenario(lambda: (_producer("a", "b"), Worker("w1", fails=(0, 1)), _reaper()), job={"max_errors": 0}),
    # The budget is a share, which counts only once the job is sealed.
    "share": Scenario(
        lambda: (_producer("a", "b"), Worker("w1", fails=(0, 1)), _reaper(), _waiter()), job={"max_errors_share": 0.3}
    ),
    # A producer has to wait for room, and a client cancels.
    "room": Scenario(
        lambda: (_producer(LONG, "b"), Worker("w1"), _reaper(), _canceller(), _waiter()),
        limits={"high_water_bytes": 1024},
    ),
    # A producer waits for room while its job's budget runs out.
    "room and budget": Scenario(
        lambda: (_producer("a", LONG, "c"), Worker("w1", fails=(0, 1)), _reaper()),
        limits={"high_water_bytes": 1024},
        job={"max_errors": 0},
    ),
    # A budget runs out while the reaper is about to audit the job.
    "budget and audit": Scenario(
        lambda: (Worker("w1", fails=(0, 1), gathers=True), _reaper(), _canceller()),
        left={"lapse": 1},
        job={"max_errors": 0},
        prepare=_submitted,
    ),
    # A client retries, and may die half-way. Another client retries too, or submits the corpus again.
    "retry": Scenario(
        lambda: (_retrier(runs=2), Worker("w1", fails=(0, 1)), _reaper(), _waiter()),
        left={"death": 1},
        prepare=_ended_with_failures,
    ),
    "retry and resume": Scenario(
        lambda: (
            _retrier(),
            Program(
                name="producer", bodies={"": bodies.submits(corpus("text", "text"))}, runs=1, mortal=True, adds=True
            ),
            Worker("w1"),
            _reaper(),
        ),
        left={"death": 1, "lost answer": 1},
        prepare=_ended_with_failures,
    ),
    # A job is kept so long after its end that the reaper need not settle it. The reaper sweeps at any time.
    "kept for long": Scenario(
        lambda: (_retrier(runs=2), Worker("w1", fails=(0, 1)), _reaper(always_sweeps=True)),
        left={"death": 1},
        job={"ttl_s": 8 * 24 * 3600.0},
        prepare=_ended_with_failures,
    ),
    # A reaper whose turn is over goes on alongside the next one.
    "two reapers": Scenario(
        lambda: (_retrier(), Worker("w1", fails=(0, 1)), _reaper(), _reaper("slow", always_sweeps=True)),
        left={"lapse": 1},
        prepare=_ended_with_failures,
    ),
    # Redis loses one result. The same corpus is submitted again while a client retries or has retried.
    "lost result of a retry": Scenario(
        lambda: (_retrier(), _repairer(), Worker("w1", fails=(0, 1)), _reaper(), _waiter()),
        left={"lost result": 1, "death": 1},
        prepare=_retried,
    ),
    "lost result of a lease": Scenario(
        lambda: (_producer("a", runs=2), Worker("w1"), Worker("w2"), _reaper()), left={"lost result": 1, "lapse": 1}
    ),
    # Redis forgets its last writes. A producer resumes with a different ending of its corpus where Redis lost the old.
    "changed corpus": Scenario(
        lambda: (
            _producer("a", runs=2, others={"changed": ("b",)}),
            Worker("w1", mortal=False),
            _reaper(only_fair=True),
        ),
        left={"rollback": 1, "death": 1},
        history=5,
    ),
    "changed tail": Scenario(
        lambda: (
            _producer("a", "b", runs=2, others={"changed": ("a", "c")}),
            Worker("w1", mortal=False),
            _reaper(only_fair=True),
            _waiter(),
        ),
        left={"rollback": 1, "death": 1},
        history=6,
    ),
    # Redis forgets its last writes while nobody dies.
    "lost seal": Scenario(lambda: (_producer("a"), Worker("w1"), _reaper(), _waiter()), left={"rollback": 1}),
    # A producer dies and perhaps comes back.
    "death of a producer": Scenario(
        lambda: (_producer("a", "b", runs=2), Worker("w1"), _reaper(), _waiter()), left={"death": 1, "lapse": 1}
    ),
    # Leases lapse, workers die, answers are lost.
    "leases": Scenario(
        lambda: (_producer("a"), Worker("w1", releases=True), Worker("w2"), _reaper()),
        left={"death": 1, "lapse": 2, "lost answer": 1},
    ),
    # Bells and answers to them are lost. Workers take several chunks at once, and not those of another's model.
    "bells": Scenario(
        lambda: (_producer("a", "b"), Worker("w1", gathers=True), Worker("w2", fingerprint=OTHER), _reaper()),
        left={"death": 1, "lapse": 1, "lost answer": 2, "lost bells": 2},
    ),
    "other models and rollback": Scenario(
        lambda: (Worker("w1", releases=True), Worker("w2", fingerprint=OTHER), _reaper()),
        left={"rollback": 1, "lapse": 1, "lost bells": 1},
        prepare=_submitted,
    ),
    # What killed a worker is given to quarantine, while there is one.
    "quarantine": Scenario(
        lambda: (Worker("w1", gathers=True), Worker("w2"), Worker("q", quarantine=True), _reaper()),
        left={"death": 2, "lapse": 2, "lost answer": 1},
        prepare=_submitted,
    ),
    # Of jobs that were in hand at a death, a worker has one at a time.
    "watched": Scenario(
        lambda: (Worker("w1", gathers=True), Worker("w2"), Worker("q", quarantine=True), _reaper()),
        left={"death": 1, "lapse": 2, "lost answer": 1, "rollback": 1},
        prepare=_after_a_death,
    ),
    # Jobs of several tenants take turns in their lanes.
    "turns": Scenario(
        lambda: (_producer("a"), Worker("w1", fails=(0, 1), gathers=True), Worker("w2", releases=True), _reaper()),
        left={"death": 1, "lapse": 1, "lost answer": 1, "lost bells": 1},
        prepare=_beside_others,
    ),
    "turns and losses": Scenario(
        lambda: (_producer("a"), Worker("w1", releases=True, gathers=True), Worker("w2"), _reaper(), _canceller()),
        left={"death": 1, "lapse": 2, "lost answer": 1, "lost turns": 2, "rollback": 1},
        prepare=_beside_others,
    ),
    # A job is stopped while its producer submits it, or resumes it, and workers still hold its chunks.
    "stop": Scenario(
        lambda: (_producer("a", "b", runs=3), Worker("w1", fails=(0, 1)), _reaper(), _stopper(runs=2), _waiter()),
        left={"death": 1, "lapse": 1, "lost answer": 1},
    ),
    "stop and retry": Scenario(
        lambda: (_retrier(), _repairer(), Worker("w1"), _reaper(), _stopper()),
        left={"death": 1},
        prepare=_ended_with_failures,
    ),
    # The tenant's limits leave room for one chunk at a time.
    "limits": Scenario(
        lambda: (_producer("a", "b", runs=2), Worker("w1"), _reaper(), _canceller()),
        left={"death": 1, "lapse": 1, "lost answer": 1},
        prepare=_limited,
    ),
    "limits and stop": Scenario(
        lambda: (_producer("a", "b", runs=2), Worker("w1", fails=(0, 1)), _reaper(), _stopper()),
        left={"death": 1, "lapse": 1},
        prepare=_limited,
    ),
    "limits and rollback": Scenario(
        lambda: (_producer("a", "b", runs=2), Worker("w1"), _reaper()),
        left={"rollback": 1, "death": 1},
        prepare=_limited,
    ),
    "limits and retry": Scenario(
        lambda: (_retrier(runs=2), _repairer(), Worker("w1", fails=(0, 1)), _reaper()),
        left={"lost result": 1, "death": 1},
        prepare=_limited_with_failures,
    ),
    # A drainer moves results out of Redis, and may die between any two steps; another one takes over.
    "drain": Scenario(
        lambda: (_producer("a", "b", runs=2), Worker("w1"), _drainer(), _reaper(), _waiter()),
        left={"death": 1, "lapse": 1, "lost answer": 1},
    ),
    "two drainers": Scenario(
        lambda: (_drainer(), _drainer("other"), _retrier(), Worker("w1", fails=(0, 1)), _reaper()),
        left={"death": 1, "lost answer": 1},
        prepare=_ended_with_failures,
    ),
    "drain and lost result": Scenario(
        lambda: (_drainer(), _retrier(), _repairer(), Worker("w1", fails=(0, 1)), _reaper()),
        left={"lost result": 1, "death": 1},
        prepare=_ended_with_failures,
    ),
    "drain and rollback": Scenario(
        lambda: (_producer("a", runs=2), Worker("w1"), _drainer(), _reaper(), _waiter()),
        left={"rollback": 1, "death": 1},
    ),
    "retry and rollback": Scenario(
        lambda: (_retrier(runs=2), Worker("w1", fails=(0, 1)), _reaper(), _waiter()),
        left={"rollback": 1},
        prepare=_ended_with_failures,
    ),
}


def _everybody() -> tuple[Actor, ...]:
    others = {"changed": ("a", "b", "y"), "longer": ("a", "b", "c", "d"), "shorter": ("a", "b")}
    return (
        _producer("a", "b", "c", runs=3, others=others),
        Worker("w1", fails=(0, 0, 1), releases=True, gathers=True),
        Worker("w2", fails=(0, 0, 2), releases=True),
        Worker("q", quarantine=True),
        _reaper(),
        _retrier(runs=2),
        _retrier("other"),
        _waiter(),
        Program("reader", {"": bodies.fetches}),
    )


#: Large worlds, for random walks.
SCENARIOS["everybody and a canceller"] = Scenario(
    lambda: (*_everybody(), _canceller()), left={"death": 2, "lapse": 3, "lost answer": 2, "lost bells": 1}
)
SCENARIOS["everybody with a budget"] = Scenario(
    _everybody, left={"death": 2, "lapse": 3, "lost answer": 2, "lost bells": 1}, job={"max_errors": 2}
)
SCENARIOS["everybody and an older Redis"] = Scenario(
    _everybody, left={"death": 2, "lapse": 4, "lost answer": 2, "lost bells": 1, "rollback": 2}, history=12
)
SCENARIOS["everybody within limits"] = Scenario(
    lambda: (*_everybody(), _stopper()),
    left={"death": 2, "lapse": 4, "lost answer": 2, "lost bells": 1, "rollback": 1},
    prepare=_limited,
    history=8,
)
