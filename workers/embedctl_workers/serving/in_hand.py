"""The chunks that a worker process holds right now, shared by the task threads and the heartbeat."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from embedctl.store import Doubts


@dataclass(slots=True)
class Held:
    """A leased chunk.

    Attributes:
        token: of the claim.
        model: the name under which its job asks for it.
        attempt: how often the chunk was claimed, this time included; 0 before that is known.
        unwanted: set when its job has ended or was cancelled.
        rest_s: how long its thread rests when it has done with it.
        doubts: what earlier owners could not do with it.
        row: that its careful encode has come to, the worker being well before it; None where there is none.
        moving_since: when its encode last made progress, by the monotonic clock; None while it is not encoding.
    """

    job_id: str
    chunk: int
    token: str
    model: str
    attempt: int = 0
    rest_s: float = 0.0
    doubts: Doubts | None = None
    row: int | None = None
    unwanted: threading.Event = field(default_factory=threading.Event)
    moving_since: float | None = None

    @property
    def fields(self) -> dict[str, object]:
        """What every line of the log about it bears."""
        fields: dict[str, object] = {"job": self.job_id, "chunk": self.chunk}
        return {**fields, "attempt": self.attempt} if self.attempt else fields


class InHand:
    """A set of held chunks that threads may share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}

    def take(self, held: Held) -> None:
        """Begin to hold a chunk."""
        with self._lock:
            self._held[held.token] = held

    def drop(self, held: Held) -> None:
        """No longer hold it."""
        with self._lock:
            self._held.pop(held.token, None)

    def all(self) -> list[Held]:
        """What is held at this moment."""
        with self._lock:
            return list(self._held.values())

    def forgive(self, seconds: float) -> None:
        """Take off a time in which this process stood still as a whole, and so could make no progress."""
        for held in self.all():
            since = held.moving_since  # read once: its own thread may end the encode meanwhile
            if since is not None:
                held.moving_since = since + seconds

    def quietest(self) -> tuple[Held, float] | None:
        """The chunk whose encode has made no progress for longest, and for how many seconds; None if none encodes."""
        now = time.monotonic()
        moving = [(held, now - since) for held in self.all() if (since := held.moving_since) is not None]
        return max(moving, key=lambda each: each[1], default=None)
