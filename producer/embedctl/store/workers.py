"""Which workers are alive, what they serve and how fast they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from embedctl.store.connection import Connection
from embedctl_config import keys

_SLICE = 200


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as one worker serves it: its fingerprint, and tokens/s as measured so far."""

    fingerprint: str
    dim: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """What a worker process says of itself in its heartbeat.

    Attributes:
        instance: unique to the process; `name` is the Celery node name and comes back with the next process.
        cpus: the CPUs that it is pinned to, `threads` its compute threads.
        holding: (job, chunk) in hand.
        progressed_ms: when it last finished a batch, in ms by its own clock; 0 before the first.
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

    @property
    def queues(self) -> list[str]:
        """The queues that it consumes."""
        return [keys.queue(self.hardware, model) for model in self.models]


class WorkerRegistry:
    """Heartbeats of workers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def beat(self, worker: WorkerRow) -> None:
        """Say that a worker is alive; true for :data:`keys.HEARTBEAT_TTL_S` seconds."""
        now = self._connection.now_ms()
        until = now + keys.HEARTBEAT_TTL_S * 1000
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            pipe.set(keys.heartbeat(worker.instance), json.dumps(asdict(worker)), ex=keys.HEARTBEAT_TTL_S)
            for members in (keys.WORKERS, *map(keys.queue_workers, worker.queues)):
                pipe.zadd(members, {worker.instance: until})
                pipe.zremrangebyscore(members, "-inf", now - 1)
                pipe.expire(members, keys.HEARTBEAT_TTL_S * 4)
            pipe.execute()

    def leave(self, worker: WorkerRow) -> None:
        """Say that a worker has stopped."""
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False).unlink(keys.heartbeat(worker.instance))
            for members in (keys.WORKERS, *map(keys.queue_workers, worker.queues)):
                pipe.zrem(members, worker.instance)
            pipe.execute()

    def count(self, queue: str) -> int:
        """How many live workers consume a queue."""
        now = self._connection.now_ms()
        with self._connection.client() as client:
            return int(client.zcount(keys.queue_workers(queue), now, "+inf"))

    def alive(self) -> Iterator[WorkerRow]:
        """Every live worker, read in slices."""
        now = self._connection.now_ms()
        at = 0
        while True:
            with self._connection.client() as client:
                names = client.zrangebyscore(keys.WORKERS, now, "+inf", start=at, num=_SLICE)
                beats = client.mget([keys.heartbeat(name.decode()) for name in names]) if names else []
            yield from (_parse(beat) for beat in beats if beat)
            if len(names) < _SLICE:
                return
            at += _SLICE


def _parse(beat: bytes) -> WorkerRow:
    facts: dict[str, Any] = json.loads(beat)
    known = WorkerRow.__dataclass_fields__
    # A newer worker may say more than this version knows.
    facts = {name: value for name, value in facts.items() if name in known}
    facts["models"] = {
        name: ServedModel(model["fingerprint"], model["dim"], model["tokens_per_s"])
        for name, model in facts["models"].items()
    }
    facts["holding"] = tuple((job, chunk) for job, chunk in facts["holding"])
    return WorkerRow(**facts)
