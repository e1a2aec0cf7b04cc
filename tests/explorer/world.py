"""One moment of the explored world: the content of Redis, the knowledge of every actor, and what may still go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import end_leases
from embedctl.store import JobStore, Upkeep, WorkerRegistry
from embedctl_config import keys
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Limits, Settings
from tests.explorer.snapshots import LONG_S, NOW, ExplorerConnection, Snapshot, View
from tests.explorer.steps import Recorder, no_time_of_its_own, stepped_broker
from tests.support.store import QUEUE, row, spec

#: Chunk → digest of its text, as the job holds it now or held it when the chunk was encoded.
Texts = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Past:
    """The content of Redis some steps ago."""

    snapshot: Snapshot
    texts: Texts


@dataclass(frozen=True)
class State:
    """A moment.

    Attributes:
        actors: what each actor knows.
        left: fault → how often it may still happen.
        history: earlier contents of Redis, the newest last; kept while Redis may still go back.
        lost: chunks whose results Redis lost, repaired or not.
        went_back: whether Redis ever went back or lost a result.
    """

    snapshot: Snapshot
    texts: Texts
    actors: tuple[Any, ...]
    left: tuple[tuple[str, int], ...]
    history: tuple[Past, ...] = ()
    lost: tuple[int, ...] = ()
    went_back: bool = False

    @cached_property
    def key(self) -> int:
        """A hash that is equal for two states with the same possible futures."""
        return hash(
            (
                self.snapshot.canonical,
                self.texts,
                tuple(actor.key for actor in self.actors),
                self.left,
                tuple(past.snapshot.canonical for past in self.history),
                self.lost,
                self.went_back,
            )
        )

    def may(self, fault: str) -> bool:
        return dict(self.left).get(fault, 0) > 0

    def spend(self, fault: str) -> State:
        left = tuple((name, count - (name == fault)) for name, count in self.left)
        gone_back_no_more = not dict(left).get("rollback", 0)
        return replace(self, left=left, history=() if gone_back_no_more else self.history)

    def with_actor(self, at: int, actor: Any) -> State:
        return replace(self, actors=(*self.actors[:at], actor, *self.actors[at + 1 :]))


@dataclass
class World:
    """The store under exploration, with one job in it that the actors work on, and perhaps others beside it."""

    broker: Broker
    connection: ExplorerConnection
    recorder: Recorder
    job_id: str
    others: list[str] = field(default_factory=list)
    stepped: Broker = field(init=False)
    clock: float = 1000.0

    def __post_init__(self) -> None:
        self.stepped = stepped_broker(self.broker, self.recorder)

    def view(self, snapshot: Snapshot) -> View:
        return View(snapshot, self.job_id)

    def views(self, snapshot: Snapshot) -> list[View]:
        """The job's part of a snapshot, then those of the others."""
        return [View(snapshot, job_id) for job_id in (self.job_id, *self.others)]

    def lapse(self, job_id: str, chunk: bytes, owner: bytes) -> None:
        """Move the end of a chunk's lease into the past."""
        words = owner.split(b" ")
        self._do("hset", keys.owners(job_id), chunk, b" ".join([*words[:4], b"1", *words[5:]]))

    def let_take(self, key: str, chunk: bytes) -> None:
        """Move the time when a chunk may be taken again into the past."""
        self._do("zadd", key, {chunk: 1}, xx=True)

    def let_again(self, job_id: str, field: bytes, instance: bytes) -> None:
        """End the time in which a worker leaves a chunk to others."""
        self._do("hset", keys.attempts(job_id), field, instance + b" 1")

    def forget_given(self, token: str) -> None:
        """Nobody asks with this token again, or too late."""
        self._do("delete", keys.given(token))

    def hear(self) -> None:
        """Take a bell, if there is one."""
        self._do("rpop", QUEUE)

    def lose_bells(self) -> None:
        self._do("delete", QUEUE)

    def lose_turns(self, kind: str) -> None:
        """Lose one kind of the lists that say whose turn it is."""
        with self.connection.client() as client:
            client.delete(*client.scan_iter(keys.turns(f"{kind}*")))

    def come_up(self) -> None:
        """Make the reaper's next look at each job due now."""
        self._do("zadd", keys.UPKEEP, dict.fromkeys((self.job_id, *self.others), NOW), xx=True)

    def grow_old(self) -> None:
        """Make the job's last progress long past."""
        self._do("hset", keys.job(self.job_id), "progressed_ms", 1)

    def lose_result(self, chunk: int) -> None:
        self._do("delete", keys.chunk_result(self.job_id, chunk))

    def end_producer_lease(self) -> None:
        self._do("delete", keys.producer(self.job_id))

    def trust(self, job_id: str) -> None:
        """End the time in which a job is distrusted after a death."""
        self._do("hset", keys.job(job_id), "distrusted_ms", 1)

    def watch(self, job_id: str) -> None:
        self._do("hset", keys.job(job_id), "watched_ms", int(self.connection.now_ms() + LONG_S * 1000))

    def watch_no_longer(self, job_id: str) -> None:
        self._do("hset", keys.job(job_id), "watched_ms", 1)

    def forgive(self, key: bytes, field: bytes) -> None:
        """End the time of a tenant's distrust, or of its watch."""
        self._do("hset", key, field, 1)

    def let_go(self, instance: str, job_id: str, waiting: str) -> None:
        """End the time in which a worker is a watched job's, and another one of them waits for it."""
        self._do("set", keys.watched(instance), f"{job_id} 1 {waiting}", keepttl=True)

    def beat(self, instance: str, *, quarantine: bool) -> None:
        """Let a worker begin. A new process is a new instance, so a report of the old one's death stays true."""
        self._do("delete", keys.died(instance))
        self.broker.workers.beat(row(instance, quarantine=quarantine))
        self._lives_until(instance, self.connection.now_ms() + LONG_S * 3000, quarantine)

    def die(self, instance: str, *, witnessed: bool, quarantine: bool) -> None:
        """Let a worker die. Others know only that it is silent or, if witnessed, that it died: then they end its
        leases."""
        self._lives_until(instance, 1, quarantine)
        if witnessed:
            self._do("set", keys.died(instance), "dead", px=10**8)
            end_leases(self.broker, {instance}, [])

    def _lives_until(self, instance: str, at_ms: float, quarantine: bool) -> None:
        for members in (keys.WORKERS, keys.queue_quarantine(QUEUE) if quarantine else keys.queue_workers(QUEUE)):
            self._do("zadd", members, {instance: at_ms})

    def _do(self, command: str, *args: Any, **options: Any) -> None:
        with self.connection.client() as client:
            getattr(client, command)(*args, **options)


@contextmanager
def a_world(folder: Path, *, scripts: Callable[[str], str], job: Mapping[str, Any], **limits: Any) -> Iterator[World]:
    """A world around a new job, in the Redis of this folder; its scripts come by their names."""
    known = Settings(
        redis_url=f"unix://{folder}/redis.sock",
        classes={"dummy": HardwareClass(backend="dummy")},
        hardware="dummy",
        model="dummy",
        lease_s=LONG_S,
        # The high water mark is given, because Redis is not to be asked for its maxmemory.
        limits=Limits(**{"high_water_bytes": 2**28, **limits}),
    )
    connection = ExplorerConnection(known, scripts)
    recorder = Recorder()
    jobs = JobStore(connection, known)
    broker = Broker(known, connection, jobs, WorkerRegistry(connection), Upkeep(connection, known))
    try:
        job_id, _ = jobs.create(spec(**job))
        with no_time_of_its_own(recorder):
            yield World(broker, connection, recorder, job_id)
    finally:
        with connection.client() as client:
            client.flushall()
        connection.close()
