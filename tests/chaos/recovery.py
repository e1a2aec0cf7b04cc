"""Measures the time from a kill until other workers hold the dead worker's chunks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from embedctl_config import keys
from tests.chaos.stack import OUTAGE, Stack

_POLL_S = 0.1
#: A chunk that is done this soon after the kill was on its way to Redis when the worker died (seconds).
_IN_FLIGHT_S = 0.05


@dataclass(eq=False)
class Loss:
    """A chunk that a killed worker held.

    Attributes:
        hardware: the worker's class.
        reaped_at: when the dead worker's lease was revoked and the chunk's ticket sent again.
        recovered_at: when another worker owned the chunk; until then the ticket waited behind others.
        dropped: the chunk was already finished, or is no longer wanted.
    """

    hardware: str
    job_id: str
    chunk: int
    token: bytes
    died_at: float
    reaped_at: float | None = None
    recovered_at: float | None = None
    dropped: bool = False

    @property
    def open(self) -> bool:
        return self.recovered_at is None and not self.dropped

    @property
    def reaped_s(self) -> float:
        """Time from the kill until the chunk's ticket was sent again."""
        assert self.reaped_at is not None
        return self.reaped_at - self.died_at

    @property
    def recovered_s(self) -> float:
        """Time from the kill until another worker owned the chunk."""
        assert self.recovered_at is not None
        return self.recovered_at - self.died_at


@dataclass
class Recoveries:
    """Watches the chunks of killed workers, in a thread."""

    stack: Stack
    losses: list[Loss] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="recoveries", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, hardware: str, held: list[tuple[str, int, bytes]]) -> list[Loss]:
        """Watch chunks whose owner, a worker of that class, dies now."""
        losses = [Loss(hardware, job_id, chunk, token, time.monotonic()) for job_id, chunk, token in held]
        self.losses += losses
        return losses

    def open(self) -> list[Loss]:
        """Chunks that nobody has taken yet."""
        return [loss for loss in self.losses if loss.open]

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            for loss in self.open():
                try:
                    self._look(loss)
                except OUTAGE:
                    break

    def _look(self, loss: Loss) -> None:
        pipe = self.stack.raw.pipeline(transaction=False)
        pipe.hget(keys.owners(loss.job_id), str(loss.chunk))
        pipe.exists(keys.chunk_result(loss.job_id, loss.chunk))
        pipe.hget(keys.job(loss.job_id), "state")
        owner, done, state = pipe.execute()
        now = time.monotonic()
        unwanted = state in (None, b"cancelled")
        if unwanted or (done and now - loss.died_at < _POLL_S + _IN_FLIGHT_S):
            loss.dropped = True
            return
        gone = done or owner is None or not owner.startswith(loss.token)
        if gone and loss.reaped_at is None:
            loss.reaped_at = now
        if done or (gone and owner is not None):
            loss.recovered_at = now
