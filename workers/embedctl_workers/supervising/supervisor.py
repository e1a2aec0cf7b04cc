"""Keeps workers alive: starts and restarts them, reports how they died, and drains them in the end."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Self

from embedctl_config.errors import WorkerError
from embedctl_workers.supervising.places import GatewayPlace, Place, WorkerPlace, drain

#: The longest that the loop sleeps (seconds); the end of a child wakes it.
_LONGEST_WAIT_S = 5.0


class Supervisor:
    """Runs workers, none of which has been started, until it is told to stop.

    Args:
        on_ready: called once, when each worker is ready or given up, and at least one is ready.
        check: called in each round of the loop; what it raises ends the supervisor.
        gateway: runs beside the workers; it has been started.
        quarantines: start when a worker wants them.
    """

    def __init__(
        self,
        workers: Sequence[WorkerPlace],
        *,
        on_ready: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
        gateway: GatewayPlace | None = None,
        quarantines: Sequence[Place] = (),
    ) -> None:
        self._workers = workers
        self._quarantines = quarantines
        self._gateways = [] if gateway is None else [gateway]
        self._all: Sequence[Place] = [*self._workers, *self._quarantines, *self._gateways]
        self._on_ready = on_ready
        self._check = check
        self._said_ready = False

    def run(self) -> None:
        """Look after the workers until SIGTERM or Ctrl-C, then drain them. Call it in the main thread.

        A WorkerError if every worker is given up, with a worker's exit status; or what `check` raises.
        """
        with _Signals() as signals:
            try:
                while not signals.stop:
                    self._check()
                    self._tend_all()
                    signals.wait(self._until_next())
            finally:
                self._drain(signals)

    def _tend_all(self) -> None:
        for place in self._all:
            place.tend()
        self._give_up_if_none_is_left()
        self._say_ready()

    def _give_up_if_none_is_left(self) -> None:
        given_up = [place.restarts.given_up for place in self._workers if place.restarts.given_up is not None]
        if len(given_up) == len(self._workers):
            raise WorkerError("no worker is left: all of them failed and were given up", exit_code=max(1, *given_up))

    def _say_ready(self) -> None:
        if not self._said_ready and all(place.settled for place in self._workers):
            self._said_ready = True
            self._on_ready()

    def _until_next(self) -> float:
        """Seconds until there is something to do that no signal announces."""
        pauses = [place.pause() for place in self._all]
        return min([_LONGEST_WAIT_S, *(pause for pause in pauses if pause is not None)])

    def _drain(self, signals: _Signals) -> None:
        """End all places; on another Ctrl-C, at once. The gateway needs the workers for the requests in flight."""
        for places, how in (
            (self._gateways, "the gateway answers what is in flight; Ctrl-C again kills it"),
            (
                [*self._workers, *self._quarantines],
                "each worker finishes the chunk that it encodes; Ctrl-C again kills them",
            ),
        ):
            drain(places, how, signals.wait, lambda: signals.kill)


class _Signals:
    """Catches SIGTERM and Ctrl-C (`stop`; Ctrl-C after that: `kill`), and wakes a loop for them and a child's end."""

    def __init__(self) -> None:
        self.stop = self.kill = False

    def __enter__(self) -> Self:
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._wakeup_fd = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, self._take)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
            # A shell's background job ignores Ctrl-C, and goes on ignoring it.
            if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_fd)
        self._woken.close()
        self._waker.close()

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, at most this long."""
        ready, _, _ = select.select([self._woken], [], [], seconds)
        if ready:
            self._woken.recv(4096)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.kill = self.kill or (self.stop and number == signal.SIGINT)
            self.stop = True
