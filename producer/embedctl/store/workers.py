"""Which workers are alive, what they serve and how fast they are."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, compress
from typing import Any

from embedctl.common.machine import machine_id, runs
from embedctl.store.connection import Connection
from embedctl.store.heartbeats import ServedModel, WorkerRow, parse, written
from embedctl.store.status import JobStatus
from embedctl_config import keys
from embedctl_config.outputs import PLAIN, Output

#: Most workers that are read at once.
_READ = 500
log = logging.getLogger(__name__)

#: How a worker ended of whose death nobody has told.
SILENT = "no word from it"
#: Heartbeats that are read together, about half a megabyte.
_SLICE = 500
#: Of workers that are gone, usually only the first ones are wanted, so fewer are read together.
_GONE_SLICE = 100
#: The offers of live workers are kept for this long (seconds), because a thousand heartbeats are a megabyte. Each
#: hundred workers add a second, up to the longest time. Workers tell new rates every five seconds anyway.
OFFERS_S, LONGEST_OFFERS_S = 1.0, 5.0
#: A job without progress for this long may wait for other workers than those that are alive (seconds).
_QUIET_S = 10.0
#: After one in quarantine died, its supervisor has so long to say that it starts the next one (seconds). Neighbours may
#: see the death first.
_RESTARTED_S = 5
#: The numbers of live workers of so many queues are remembered.
_MOST_COUNTED = 256


@dataclass(frozen=True, slots=True)
class Starting:
    """A worker that takes no chunks yet.

    Attributes:
        name: the one that it will have, unless another live worker has it by then.
        models: the names of those that it is started for.
        doing: what it does, or waits for, in words.
        began_ms: since when, in ms by about Redis' clock.
        until_ms: about when that ends, by how long it took last time; None if that is not known.
    """

    name: str
    hardware: str
    models: Sequence[str]
    doing: str
    began_ms: int
    until_ms: int | None = None

    def words(self, now_ms: float) -> str:
        """What it does, and how much longer."""
        if self.until_ms is None:
            return self.doing
        left_s = (self.until_ms - now_ms) / 1000
        return f"{self.doing}, {f'about {left_s:.0f} s left' if left_s > 0 else 'longer than last time'}"


class StartingWorkers:
    """What workers say before they beat, and what a supervisor says of those that it will start."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, instance: str, worker: Starting, counts_s: int = keys.HEARTBEAT_TTL_S) -> None:
        """Say what a worker does, which counts for so many seconds, :data:`keys.GONE_TTL_S` at most."""
        now = self._connection.about_now_ms()
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            pipe.set(keys.starting(instance), json.dumps(asdict(worker)), ex=counts_s)
            pipe.zadd(keys.STARTING, {instance: now + counts_s * 1000})
            pipe.zremrangebyscore(keys.STARTING, "-inf", now - 1)
            pipe.expire(keys.STARTING, keys.GONE_TTL_S)
            pipe.execute()

    def end(self, instance: str) -> None:
        """The worker beats, or is no more."""
        with self._connection.client() as client:
            client.pipeline(transaction=False).unlink(keys.starting(instance)).zrem(keys.STARTING, instance).execute()

    def all(self) -> list[Starting]:
        """Those that said something lately, by class and name, at most 500. One that can't be read hides no other."""
        with self._connection.client() as client:
            names = client.zrangebyscore(keys.STARTING, self._connection.about_now_ms(), "+inf", start=0, num=_READ)
            said = client.mget([keys.starting(name.decode()) for name in names]) if names else []
        return sorted(filter(None, map(_parsed, said)), key=lambda each: (each.hardware, each.name))


def _parsed(said: bytes | None) -> Starting | None:
    try:
        return None if said is None else Starting(**json.loads(said))
    except (ValueError, TypeError):  # of another version, perhaps
        return None


@dataclass(frozen=True, slots=True)
class GoneWorker:
    """A worker that is dead, stopped or cut off: its last heartbeat, the seconds since it expired, and how it ended."""

    worker: WorkerRow
    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class Offer:
    """The combined offer of the live workers of a class for a model in a precision.

    Attributes:
        tokens_per_s: the sum of their rates.
        dim: the dimensions of their vectors; the smallest number if they differ.
        spelling_of: as that of :class:`ServedModel`, if it is the same for all of them; else empty.
        sustained: the rates in tokens/s that workers reached with large chunks, of those that had any.
        max_tokens: the longest text that one of them encodes whole; 0 if none says so.
        prompts: the names of the prompts that each of them has; None if one does not say.
        fingerprints: of the models that they serve.
        outputs: what each of them gives of a text (:class:`~embedctl_config.outputs.Output`).
        multi_width: the dimensions of each vector of a multi-vector; 0 if none gives one.
        matryoshka: as that of :class:`ServedModel`, of all of them.
        pooling: as that of :class:`ServedModel`, of one of them.
    """

    tokens_per_s: float
    dim: int
    spelling_of: str = ""
    workers: int = 1
    sustained: tuple[float, ...] = ()
    max_tokens: int = 0
    prompts: frozenset[str] | None = None
    fingerprints: frozenset[str] = frozenset()
    outputs: Sequence[str] = PLAIN
    multi_width: int = 0
    matryoshka: bool = True
    pooling: str = ""


#: Hardware class, model, precision.
Offered = tuple[str, str, str]


class WorkerRegistry:
    """Heartbeats of workers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._offers: Mapping[Offered, Offer] = {}
        self._offers_until = 0.0
        self._counted: dict[str, tuple[float, int]] = {}
        self._unreadable: set[str] = set()
        self.not_ready = StartingWorkers(connection)

    def beat(self, worker: WorkerRow) -> None:
        """Store a worker's heartbeat, which counts for :data:`keys.HEARTBEAT_TTL_S` seconds."""
        now = self._connection.now_ms()
        until = now + keys.HEARTBEAT_TTL_S * 1000
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            pipe.set(keys.heartbeat(worker.instance), written(worker), ex=keys.GONE_TTL_S)
            for members in (keys.WORKERS, *_members(worker)):
                pipe.zadd(members, {worker.instance: until})
                # Only the set of all workers keeps those that are gone for a while, so that they can be reported.
                pipe.zremrangebyscore(members, "-inf", now - 1 - (members == keys.WORKERS) * keys.GONE_TTL_S * 1000)
                pipe.expire(members, keys.GONE_TTL_S)
            if worker.machine:
                pipe.hset(keys.machine(worker.machine), worker.instance, worker.process)
                pipe.expire(keys.machine(worker.machine), keys.GONE_TTL_S)
            pipe.execute()

    def leave(self, worker: WorkerRow) -> None:
        """Record that a worker has stopped on request."""
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False).unlink(keys.heartbeat(worker.instance))
            pipe.zrem(keys.WORKERS, worker.instance)
            for members in _members(worker):
                _no_longer_at(pipe, members, worker.instance)
            pipe.hdel(keys.machine(worker.machine), worker.instance)
            pipe.set(keys.died(worker.instance), keys.LEFT, ex=keys.GONE_TTL_S)
            pipe.execute()

    def expect_quarantine(self, queues: Sequence[str], name: str, within_s: float) -> None:
        """Say that a worker in quarantine will beat within this time: what may kill a worker waits for it."""
        until, members = self._connection.now_ms() + int(within_s * 1000), map(keys.queue_quarantine, queues)
        self._connection.ask_each(members, lambda pipe, key: pipe.zadd(key, {name: until}).expire(key, keys.GONE_TTL_S))

    def witness(self) -> set[str]:
        """Report the deaths of workers of this machine whose processes have ended; returns their instances.

        From another machine, a stopped or unreachable worker looks dead. A process of the same machine can check, so a
        death that it reports is certain, and takes effect at once.
        """
        here = keys.machine(machine_id())
        with self._connection.client() as client:
            found = client.hgetall(here)
        dead = {name.decode() for name, process in found.items() if not runs(process.decode())}
        for instance in dead:
            self.report_death(instance, "its process ended without a word")
        if dead:
            with self._connection.client() as client:
                client.hdel(here, *dead)
        return dead

    def holding(self, instances: Collection[str]) -> set[str]:
        """The jobs whose chunks these workers held at their last heartbeats."""
        beats = self._connection.ask_each(instances, lambda pipe, instance: pipe.get(keys.heartbeat(instance)))
        workers = self._parsed(instances, beats)
        return {job_id for worker in workers for job_id, _ in worker.holding if keys.is_job_id(job_id)}

    def report_death(self, instance: str, how: str) -> None:
        """Record that a worker has certainly died, so that its chunks become suspect."""
        now = self._connection.now_ms()
        with self._connection.client() as client:
            beat = client.get(keys.heartbeat(instance))
            pipe = client.pipeline(transaction=False).set(keys.died(instance), how, ex=keys.GONE_TTL_S)
            for worker in self._parsed([instance], [beat]):
                pipe.hdel(keys.machine(worker.machine), instance)  # its death is known, so no process needs to check it
                for members in _members(worker):
                    _no_longer_at(pipe, members, instance, now + _RESTARTED_S * 1000 if worker.quarantine else 0)
            pipe.zadd(keys.WORKERS, {instance: now - 1}, xx=True, lt=True)
            pipe.execute()

    def count(self, queue: str, now_ms: int | None = None) -> int:
        """How many live workers consume a queue, now or at a time by about Redis' clock."""
        now_ms = self._connection.now_ms() if now_ms is None else now_ms
        with self._connection.client() as client:
            return int(client.zcount(keys.queue_workers(queue), now_ms, "+inf"))

    def serving(self, hardware: str, model: str, *, recent: bool = False) -> int:
        """How many live workers serve a model on a class; with `recent`, a number above 0 may be a second old.

        This is for people, so the time is about Redis', and not asked for.
        """
        queue, now = keys.queue(hardware, model), time.monotonic()
        counted, live = self._counted.get(queue, (0.0, 0))
        if not recent or not live or now - counted >= OFFERS_S:
            live = self.count(queue, self._connection.about_now_ms())
            self._counted[queue] = now, live
            if len(self._counted) > _MOST_COUNTED:
                self._counted.clear()
        return live

    def starting(self, hardware: str, model: str) -> list[str]:
        """The workers that are to serve a model on a class and are not ready, and what each of them does."""
        now_ms = self._connection.about_now_ms()
        found = (each for each in self.not_ready.all() if each.hardware == hardware and model in each.models)
        return [f"{each.name}: {each.words(now_ms)}" for each in found]

    def full_bytes(self) -> tuple[int, int] | None:
        """What a full Redis, in which no worker can beat, uses and may use (bytes); None if there is room."""
        return self._connection.full_bytes()

    def is_quiet(self, job: JobStatus) -> bool:
        """Whether a job has made no progress for some seconds."""
        return self._connection.about_now_ms() / 1000 - job.progressed_at.timestamp() > _QUIET_S

    def served_lately(self, queues: Collection[str]) -> list[str]:
        """The queues among these that a worker consumed within :data:`keys.GONE_TTL_S`, however the worker ended."""
        there = self._connection.ask_each(queues, lambda pipe, queue: pipe.exists(keys.queue_workers(queue)))
        return list(compress(queues, there))

    def alive(self, queue: str | None = None) -> Iterator[WorkerRow]:
        """Every live worker, of one queue or of all, read in slices."""
        members = keys.WORKERS if queue is None else keys.queue_workers(queue)
        return chain.from_iterable(self._slices(members, self._connection.now_ms(), "+inf"))

    def offers(self, early_s: float = 0.0) -> Mapping[Offered, Offer]:
        """The offers of the live workers, one second old at most, with many workers five; an empty answer never is. Who
        asks before others need to know has them renewed so much sooner."""
        now = time.monotonic()
        if not self._offers or now >= self._offers_until - early_s:
            serving: dict[Offered, list[ServedModel]] = defaultdict(list)
            count = 0
            for worker in self.alive():
                if worker.quarantine:
                    continue
                count += 1
                for model, served in worker.models.items():
                    serving[worker.hardware, model, worker.precision].append(served)
            self._offers = {offered: _combined(each) for offered, each in serving.items()}
            self._offers_until = now + min(OFFERS_S * max(1.0, count / 100), LONGEST_OFFERS_S)
        return self._offers

    def gone(self) -> Iterator[GoneWorker]:
        """The workers that disappeared in the last minutes without signing off, the first one first."""
        now = self._connection.now_ms()
        for workers in self._slices(keys.WORKERS, "-inf", f"({now}", size=_GONE_SLICE):
            # A slice at a time, because a restart of a whole service leaves a thousand of them.
            found = self._connection.ask_each(
                [worker.instance for worker in workers],
                lambda pipe, name: pipe.zscore(keys.WORKERS, name).get(keys.died(name)),
            )
            for worker, until, how in zip(workers, found[::2], found[1::2], strict=True):
                if until is not None and until < now:
                    yield GoneWorker(worker, (now - until) / 1000, how.decode() if how else SILENT)

    def here(self) -> Iterator[WorkerRow]:
        """The live workers of this machine. The workers of other machines are not read."""
        mine, now = machine_id(), self._connection.now_ms()
        with self._connection.client() as client:
            names = [name.decode() for name in client.hgetall(keys.machine(mine))] if mine else []
        found = self._connection.ask_each(
            names, lambda pipe, name: pipe.zscore(keys.WORKERS, name).get(keys.heartbeat(name))
        )
        for name, until, beat in zip(names, found[::2], found[1::2], strict=True):
            if until is not None and until >= now:
                yield from self._parsed([name], [beat])

    def _slices(self, members: str, least: int | str, most: str, *, size: int = _SLICE) -> Iterator[list[WorkerRow]]:
        """These workers, in slices.

        Their names are read at once, about 40 bytes each: a worker that beats between two slices of names moves to
        their end, and so would hide another one.
        """
        with self._connection.client() as client:
            found = client.zrangebyscore(members, least, most)
        names = [name.decode() for name in found]
        for at in range(0, len(names), size):
            with self._connection.client() as client:
                beats = client.mget([keys.heartbeat(name) for name in names[at : at + size]])
            yield list(self._parsed(names[at : at + size], beats))

    def _parsed(self, instances: Iterable[str], beats: Iterable[bytes | None]) -> Iterator[WorkerRow]:
        """The workers of these heartbeats. One that can't be read, of another version perhaps, hides no other."""
        for instance, beat in zip(instances, beats, strict=True):
            try:
                if beat is not None:
                    yield parse(beat)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                if instance not in self._unreadable:
                    self._unreadable.add(instance)
                    log.warning("the heartbeat of worker %s can't be read (%s)", instance, type(error).__name__)


def _combined(serving: Sequence[ServedModel]) -> Offer:
    spellings = {served.spelling_of for served in serving}
    return Offer(
        tokens_per_s=sum(served.tokens_per_s for served in serving),
        dim=min(served.dim for served in serving),
        spelling_of=spellings.pop() if len(spellings) == 1 else "",
        workers=len(serving),
        sustained=tuple(served.sustained_tokens_per_s for served in serving if served.sustained_tokens_per_s),
        max_tokens=max(served.max_tokens for served in serving),
        prompts=_common([served.prompts for served in serving]),
        fingerprints=frozenset(served.fingerprint for served in serving),
        outputs=tuple(each for each in Output if all(each in served.outputs for served in serving)),
        multi_width=max(served.multi_width for served in serving),
        matryoshka=all(served.matryoshka for served in serving),
        pooling=max(served.pooling for served in serving),
    )


def _common(prompts: Sequence[Sequence[str] | None]) -> frozenset[str] | None:
    said = [frozenset(names) for names in prompts if names is not None]
    return frozenset.intersection(*said) if len(said) == len(prompts) else None


def _members(worker: WorkerRow) -> list[str]:
    """The sets of workers that a worker is in, one for each of its queues."""
    key = keys.queue_quarantine if worker.quarantine else keys.queue_workers
    return [key(queue) for queue in worker.queues]


def _no_longer_at(pipe: Any, members: str, instance: str, after_ms: int = 0) -> None:
    """Stop counting a worker at a queue. The entry stays, as a trace of a worker, until another worker's heartbeat."""
    pipe.zadd(members, {instance: after_ms}, xx=True, lt=True)
