"""The chunks that a worker process holds right now, shared by the task threads and the heartbeat; and which of them may
be in it at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from embedctl.store import Doubts
from embedctl_workers.machine.tally import Tally


@dataclass(slots=True)
class Held:
    """A leased chunk."""

    job_id: str
    chunk: int
    token: str  #: of the claim
    model: str  #: the name under which its job asks for it
    attempt: int = 0  #: how often the chunk was claimed, this claim included; 0 before that is known
    rest_s: float = 0.0  #: how long its thread rests after it (seconds)
    doubts: Doubts | None = None  #: what earlier owners could not do with it
    row: int | None = None  #: the row that its careful encode is at, if the worker was well before that row; else None
    unwanted: threading.Event = field(default_factory=threading.Event)  #: set when its job has ended or was cancelled
    #: when its encode last made progress, by the monotonic clock; None while it does not encode
    moving_since: float | None = None
    #: whether it has batches on the device, or waits there for other chunks: their progress counts too
    on_device: bool = False

    @property
    def fields(self) -> dict[str, object]:
        fields: dict[str, object] = {"job": self.job_id, "chunk": self.chunk}
        return {**fields, "attempt": self.attempt} if self.attempt else fields


class InHand:
    """A set of held chunks that threads may share; their encodes move by the monotonic clock `now`, in seconds.

    `tally` is told how many there are. `progressed_ms` is when a batch was last finished, in ms by about Redis' clock;
    0 before the first.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic, tally: Tally | None = None) -> None:
        self.now = now
        self.tally = tally
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int, str], Held] = {}
        self._device_moved = 0.0
        self.progressed_ms = 0

    def take(self, held: Held) -> None:
        with self._lock:
            self._held[held.job_id, held.chunk, held.token] = held
            self._tell()

    def drop(self, held: Held) -> None:
        with self._lock:
            self._held.pop((held.job_id, held.chunk, held.token), None)
            self._tell()

    def completed(self) -> None:
        """A chunk's result is stored."""
        if self.tally is not None:
            self.tally.completed()

    def _tell(self) -> None:
        if self.tally is not None:
            self.tally.hold(len(self._held))

    def all(self) -> list[Held]:
        with self._lock:
            return list(self._held.values())

    def progressed(self, held: Held, now_ms: int) -> None:
        """A batch of a chunk was finished; `now_ms` is by about Redis' clock."""
        held.moving_since = self._device_moved = self.now()
        self.progressed_ms = now_ms

    def forgive(self, seconds: float) -> None:
        """Deduct a time in which the whole process stood still, so that no chunk could make progress."""
        for held in self.all():
            since = held.moving_since  # read once: the chunk's own thread may end the encode meanwhile
            if since is not None:
                held.moving_since = since + seconds

    def quietest(self) -> tuple[Held, float] | None:
        """The chunk whose encode has made no progress for longest, and for how many seconds; None if none encodes."""
        now = self.now()
        moving = [(held, now - since) for held in self.all() if (since := self._moved(held)) is not None]
        return max(moving, key=lambda each: each[1], default=None)

    def _moved(self, held: Held) -> float | None:
        since = held.moving_since
        return max(since, self._device_moved) if since is not None and held.on_device else since


class Isolation:
    """A context that several threads may be in, until one of them isolates itself.

    What an isolated chunk does to the process, it does to no other chunk.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._isolated: int | None = None

    def __enter__(self) -> Self:
        with self._changed:
            self._changed.wait_for(lambda: self._isolated is None)
            self._inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._isolated == threading.get_ident():
                self._isolated = None
            self._changed.notify_all()

    def has_others(self) -> bool:
        with self._changed:
            return self._inside > 1

    def isolate(self) -> bool:
        """Wait until all others have left, and keep them out; False, at once, if another thread does so already."""
        with self._changed:
            if self._isolated is not None:
                return False
            self._isolated = threading.get_ident()
            self._changed.wait_for(lambda: self._inside == 1)
        return True
