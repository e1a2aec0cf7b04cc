"""Workers that are not ready yet, or not again: what each of them does, for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from embedctl.store.connection import Connection
from embedctl_config import keys

#: Most workers that are read at once.
_MOST = 500


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
            names = client.zrangebyscore(keys.STARTING, self._connection.about_now_ms(), "+inf", start=0, num=_MOST)
            said = client.mget([keys.starting(name.decode()) for name in names]) if names else []
        return sorted(filter(None, map(_parsed, said)), key=lambda each: (each.hardware, each.name))


def _parsed(said: bytes | None) -> Starting | None:
    try:
        return None if said is None else Starting(**json.loads(said))
    except (ValueError, TypeError):  # of another version, perhaps
        return None
