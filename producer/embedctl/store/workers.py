"""Which workers are alive, what they serve and how fast they are."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from embedctl.machine import machine_id, runs
from embedctl.store.connection import Connection
from embedctl_config import keys

_SLICE = 200
#: The offers of live workers are kept for this long (seconds), because a thousand heartbeats are a megabyte. Each
#: hundred workers add a second, up to the longest time. Workers tell new rates every five seconds anyway.
OFFERS_S, LONGEST_OFFERS_S = 1.0, 5.0
#: A worker that encodes but finishes no batch for this long is shown as hung (seconds).
HUNG_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as one worker serves it.

    Attributes:
        tokens_per_s, rows_per_s: rates while it encodes, as measured so far.
        padding: the share of padding in the tokens that the device received, as measured so far.
        engine: the engine that runs it, in words.
        accuracy: the gate's measurement at start, in words; empty if there was no reference.
        spelling_of: if this name is another spelling of a model that the worker serves, that model's name; else empty.
        sustained_tokens_per_s: the rate with chunks that are large enough to tell it; 0 if there was none yet, or if
            the worker is older than this figure.
        max_tokens: longer texts are truncated; 0 if the worker is older than this figure.
    """

    fingerprint: str
    dim: int
    tokens_per_s: float
    engine: str = ""
    accuracy: str = ""
    rows_per_s: float = 0.0
    padding: float = 0.0
    spelling_of: str = ""
    sustained_tokens_per_s: float = 0.0
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker process, as its heartbeat describes it.

    Attributes:
        instance: unique to the process; `name` is the Celery node name, which the next process uses again.
        machine, process: ids that other processes of the same machine can check; see :mod:`embedctl.machine`.
        cpus: the CPUs that it is pinned to; `threads`: its number of compute threads.
        bounds: bounds of its class that replace the precision's at the accuracy gate, in words.
        holding: (job, chunk) of each chunk in hand.
        progressed_ms: when it last finished a batch, in ms by approximately Redis' clock; 0 before the first.
        quiet_s: seconds without progress of the current encode; 0 while it encodes nothing.
        device: the device that it is pinned to, such as `cpu 0-3`, `gpu GPU-…` or `neuron 0`.
        metrics: the URL of its metrics and its health; empty if it serves none.
        version: the newest version of jobs that it knows; 1 if it does not say, as older workers don't.
    """

    instance: str
    name: str
    pid: int
    host: str
    hardware: str
    backend: str
    precision: str
    cpus: str
    threads: int
    models: Mapping[str, ServedModel] = field(default_factory=dict)
    holding: tuple[tuple[str, int], ...] = ()
    progressed_ms: int = 0
    machine: str = ""
    process: str = ""
    quiet_s: float = 0.0
    bounds: str = ""
    device: str = ""
    metrics: str = ""
    version: int = 1

    @property
    def activity(self) -> Literal["idle", "busy", "hung"]:
        """Whether it holds a chunk and makes progress. After `hang_s` without progress, it ends itself."""
        if self.quiet_s >= HUNG_AFTER_S:
            return "hung"
        return "busy" if self.holding else "idle"

    @property
    def queues(self) -> list[str]:
        """The queues that it consumes, one for each name of each model."""
        return [keys.queue(self.hardware, model) for model in self.models]

    @property
    def loaded(self) -> dict[str, ServedModel]:
        """The models that it holds, each under one name."""
        return {model: served for model, served in self.models.items() if not served.spelling_of}


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
        versions: the newest version of jobs that each of them knows.
        sustained: the rates in tokens/s that workers reached with large chunks, of those that had any.
        max_tokens: the longest text that one of them encodes whole; 0 if none says so.
    """

    tokens_per_s: float
    dim: int
    spelling_of: str = ""
    versions: tuple[int, ...] = ()
    sustained: tuple[float, ...] = ()
    max_tokens: int = 0


#: Hardware class, model, precision.
Offered = tuple[str, str, str]


class WorkerRegistry:
    """Heartbeats of workers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._offers: Mapping[Offered, Offer] = {}
        self._offers_until = 0.0

    def beat(self, worker: WorkerRow) -> None:
        """Store a worker's heartbeat, which counts for :data:`keys.HEARTBEAT_TTL_S` seconds."""
        now = self._connection.now_ms()
        until = now + keys.HEARTBEAT_TTL_S * 1000
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            pipe.set(keys.heartbeat(worker.instance), json.dumps(asdict(worker)), ex=keys.GONE_TTL_S)
            for members in (keys.WORKERS, *map(keys.queue_workers, worker.queues)):
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
            for queue in worker.queues:
                _no_longer_at(pipe, queue, worker.instance)
            pipe.hdel(keys.machine(worker.machine), worker.instance)
            pipe.set(keys.died(worker.instance), keys.LEFT, ex=keys.GONE_TTL_S)
            pipe.execute()

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
        if not instances:
            return set()
        with self._connection.client() as client:
            beats = client.mget([keys.heartbeat(instance) for instance in instances])
        return {job_id for beat in beats if beat for job_id, _ in _parse(beat).holding if keys.is_job_id(job_id)}

    def report_death(self, instance: str, how: str) -> None:
        """Record that a worker has certainly died, so that its chunks become suspect."""
        with self._connection.client() as client:
            beat = client.get(keys.heartbeat(instance))
            pipe = client.pipeline(transaction=False).set(keys.died(instance), how, ex=keys.GONE_TTL_S)
            if beat:
                worker = _parse(beat)
                pipe.hdel(keys.machine(worker.machine), instance)  # its death is known, so no process needs to check it
                for queue in worker.queues:
                    _no_longer_at(pipe, queue, instance)
            pipe.zadd(keys.WORKERS, {instance: self._connection.now_ms() - 1}, xx=True, lt=True)
            pipe.execute()

    def count(self, queue: str) -> int:
        """How many live workers consume a queue."""
        return self._count(queue, self._connection.now_ms())

    def _count(self, queue: str, now_ms: int) -> int:
        with self._connection.client() as client:
            return int(client.zcount(keys.queue_workers(queue), now_ms, "+inf"))

    def serving(self, hardware: str, model: str, version: int) -> tuple[int, int]:
        """How many live workers of a class and a model take jobs of this version, and how many leave them alone.

        The latter are older than the version. Who they are may be as old as :meth:`offers`. This is for people, so the
        time is about Redis', and not asked for.
        """
        live = self._count(keys.queue(hardware, model), self._connection.about_now_ms())
        if not live or version == 1:  # every worker knows that version
            return live, 0
        offered = (offer for name, offer in self.offers().items() if name[:2] == (hardware, model))
        older = sum(each < version for offer in offered for each in offer.versions)
        return max(0, live - older), older

    def served_lately(self, queues: Collection[str]) -> list[str]:
        """The queues among these that a worker consumed within :data:`keys.GONE_TTL_S`, however the worker ended."""
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            for queue in queues:
                pipe.exists(keys.queue_workers(queue))
            found = pipe.execute()
        return [queue for queue, there in zip(queues, found, strict=True) if there]

    def alive(self, queue: str | None = None) -> Iterator[WorkerRow]:
        """Every live worker, of one queue or of all, read in slices."""
        members = keys.WORKERS if queue is None else keys.queue_workers(queue)
        return self._rows(members, self._connection.now_ms(), "+inf")

    def offers(self) -> Mapping[Offered, Offer]:
        """The offers of the live workers, at most one second old, or with many workers five. An empty answer is never
        old."""
        now = time.monotonic()
        if not self._offers or now >= self._offers_until:
            offers: dict[Offered, Offer] = {}
            count = 0
            for worker in self.alive():
                count += 1
                for model, served in worker.models.items():
                    offered = (worker.hardware, model, worker.precision)
                    before = offers.get(offered, Offer(0.0, served.dim, served.spelling_of))
                    offers[offered] = Offer(
                        before.tokens_per_s + served.tokens_per_s,
                        min(before.dim, served.dim),
                        served.spelling_of if served.spelling_of == before.spelling_of else "",
                        (*before.versions, worker.version),
                        (*before.sustained, *filter(None, [served.sustained_tokens_per_s])),
                        max(before.max_tokens, served.max_tokens),
                    )
            self._offers = offers
            self._offers_until = now + min(OFFERS_S * max(1.0, count / 100), LONGEST_OFFERS_S)
        return self._offers

    def gone(self) -> Iterator[GoneWorker]:
        """The workers that disappeared in the last minutes without signing off, the first one first."""
        now = self._connection.now_ms()
        for beats in self._beats(keys.WORKERS, "-inf", f"({now}"):
            # A slice at a time, because a restart of a whole service leaves a thousand of them.
            workers = [_parse(beat) for beat in beats]
            with self._connection.client() as client:
                pipe = client.pipeline(transaction=False)
                for worker in workers:
                    pipe.zscore(keys.WORKERS, worker.instance).get(keys.died(worker.instance))
                found = pipe.execute()
            for worker, until, how in zip(workers, found[::2], found[1::2], strict=True):
                if until is not None and until < now:
                    yield GoneWorker(worker, (now - until) / 1000, (how or b"no word from it").decode())

    def here(self) -> Iterator[WorkerRow]:
        """The live workers of this machine. The workers of other machines are not read."""
        mine, now = machine_id(), self._connection.now_ms()
        with self._connection.client() as client:
            names = [name.decode() for name in client.hgetall(keys.machine(mine))] if mine else []
            pipe = client.pipeline(transaction=False)
            for name in names:
                pipe.zscore(keys.WORKERS, name).get(keys.heartbeat(name))
            found = pipe.execute()
        for until, beat in zip(found[::2], found[1::2], strict=True):
            if until is not None and until >= now and beat:
                yield _parse(beat)

    def _rows(self, members: str, least: int | str, most: int | str) -> Iterator[WorkerRow]:
        for beats in self._beats(members, least, most):
            yield from map(_parse, beats)

    def _beats(self, members: str, least: int | str, most: int | str) -> Iterator[list[bytes]]:
        """The heartbeats of these workers, in slices."""
        at = 0
        while True:
            with self._connection.client() as client:
                names = client.zrangebyscore(members, least, most, start=at, num=_SLICE)
                beats = client.mget([keys.heartbeat(name.decode()) for name in names]) if names else []
            yield [beat for beat in beats if beat]
            if len(names) < _SLICE:
                return
            at += _SLICE


def _no_longer_at(pipe: Any, queue: str, instance: str) -> None:
    """Stop counting a worker at a queue. The entry stays, as a trace of a worker, until another worker's heartbeat."""
    pipe.zadd(keys.queue_workers(queue), {instance: 0}, xx=True, lt=True)


_OF_ROW, _OF_MODEL = (frozenset(each.__dataclass_fields__) for each in (WorkerRow, ServedModel))


def _parse(beat: bytes) -> WorkerRow:
    facts: dict[str, Any] = _known(json.loads(beat.decode()), _OF_ROW)
    facts["models"] = {name: ServedModel(**_known(model, _OF_MODEL)) for name, model in facts["models"].items()}
    facts["holding"] = tuple((job, chunk) for job, chunk in facts["holding"])
    return WorkerRow(**facts)


def _known(facts: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """The facts that this version knows. A newer worker may say more."""
    return facts if facts.keys() <= names else {name: value for name, value in facts.items() if name in names}
