"""Keeps workers alive: starts and restarts them, reports how they died, and drains them in the end."""

from __future__ import annotations

import logging
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self

from embedctl.child import guarded
from embedctl_config.errors import WorkerError
from embedctl_workers.supervising.gateway import GatewayProcess
from embedctl_workers.supervising.plan import PlannedWorker
from embedctl_workers.supervising.registry_link import RegistryLink
from embedctl_workers.supervising.restarts import HOPELESS, Pace, Restarts, how_it_ended, makes_suspect

log = logging.getLogger(__name__)

#: The longest that the loop sleeps (seconds); the end of a child wakes it.
_LONGEST_WAIT_S = 5.0
#: How often the loop polls for workers that become ready or that drain (seconds).
_POLL_S = 0.25


@dataclass(slots=True, eq=False)
class _Place:
    """A worker of the plan: the name it has in logs, its process if one runs, and when that was started."""

    worker: PlannedWorker
    name: str
    restarts: Restarts
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0

    @property
    def fields(self) -> dict[str, str]:
        return {"worker": self.name}

    @property
    def settled(self) -> bool:
        """Whether it is known if the worker becomes ready."""
        return self.restarts.ready_at is not None or self.restarts.given_up is not None


class Supervisor:
    """Runs the workers of a plan until it is told to stop.

    Args:
        registry: tells that a worker is ready, and is told how one died.
        environment: of every worker; the plan adds to it.
        options: of every worker, beside those of the plan.
        on_ready: called once, when each worker is ready or given up, and at least one is ready.
        check: called in each round of the loop; what it raises ends the supervisor.
        gateway: runs beside the workers; it has been started.
    """

    def __init__(
        self,
        workers: Sequence[PlannedWorker],
        registry: RegistryLink,
        *,
        environment: Mapping[str, str],
        options: Sequence[str] = (),
        pace: Pace | None = None,
        on_ready: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
        gateway: GatewayProcess | None = None,
    ) -> None:
        self._pace = pace or Pace()
        host = socket.gethostname()
        self._places = [_Place(worker, f"{worker.name}@{host}", Restarts(self._pace)) for worker in workers]
        self._registry = registry
        self._environment = environment
        self._options = options
        self._on_ready = on_ready
        self._check = check
        self._gateway = gateway
        self._said_ready = False

    def run(self) -> None:
        """Look after the workers until SIGTERM or Ctrl-C. Call it in the main thread.

        Raises:
            WorkerError: every worker is given up; its exit status is a worker's.
            Whatever `check` raises; the workers are drained first.
        """
        with _Signals() as signals:
            try:
                while not signals.stop:
                    self._check()
                    for place in self._places:
                        self._tend(place)
                    if self._gateway is not None:
                        self._gateway.tend()
                    self._give_up_if_none_is_left()
                    self._say_ready()
                    signals.wait(self._until_next())
            finally:
                self._drain(signals)

    def _tend(self, place: _Place) -> None:
        if place.process is None:
            if place.restarts.given_up is None and time.monotonic() >= place.restarts.next_at:
                self._start(place)
        elif (status := place.process.poll()) is not None:
            self._on_exit(place, status)
        elif place.restarts.ready_at is None and (row := self._registry.row_of(place.process.pid)):
            place.name = row.name
            place.restarts.on_ready(time.monotonic())
            log.info("ready after %.1f s", time.monotonic() - place.started_at, extra=place.fields)

    def _start(self, place: _Place) -> None:
        command = [sys.executable, "-m", "embedctl_workers", *place.worker.arguments, *self._options]
        place.process = subprocess.Popen(
            guarded(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a worker logs to standard error; Celery prints here as it stops
            env={**self._environment, **place.worker.environment},
            start_new_session=True,  # so that Ctrl-C reaches the supervisor alone
        )
        place.started_at = time.monotonic()
        place.restarts.on_start()
        self._registry.expect(place.process.pid)
        log.info("starting: %s", place.worker.command, extra=place.fields)

    def _on_exit(self, place: _Place, status: int) -> None:
        """A worker has ended, and the supervisor did not tell it to."""
        self._release(place, status)
        how, restarts = how_it_ended(status), place.restarts
        pause = restarts.on_exit(status, time.monotonic())
        if restarts.given_up is None:
            log.error("%s; starting it again in %g s", how, pause, extra=place.fields)
            return
        why = "and would again" if status in HOPELESS else f"{restarts.failed_starts} times in a row"
        log.critical("given up: %s before it was ready, %s; see its messages above", how, why, extra=place.fields)

    def _release(self, place: _Place, status: int, *, by_us: bool = False) -> None:
        """Report that a process has ended, and whether what it held is suspect.

        Args:
            by_us: the supervisor has killed it, so nothing that it held is suspect.
        """
        assert place.process is not None
        suspect = makes_suspect(status)
        if suspect is not None:
            self._registry.report_exit(place.process.pid, how_it_ended(status) if suspect and not by_us else "")
        place.process = None

    def _give_up_if_none_is_left(self) -> None:
        given_up = [place.restarts.given_up for place in self._places if place.restarts.given_up is not None]
        if len(given_up) == len(self._places):
            raise WorkerError("no worker is left: all of them failed and were given up", exit_code=max(1, *given_up))

    def _say_ready(self) -> None:
        if not self._said_ready and all(place.settled for place in self._places):
            self._said_ready = True
            self._on_ready()

    def _until_next(self) -> float:
        """Seconds until there is something to do that no signal announces."""
        now, wait = time.monotonic(), _LONGEST_WAIT_S
        for place in self._places:
            if place.process is None and place.restarts.given_up is None:
                wait = min(wait, max(0.0, place.restarts.next_at - now))
            elif place.process is not None and place.restarts.ready_at is None:
                wait = min(wait, _POLL_S)
        if self._gateway is not None and (next_at := self._gateway.next_at()) is not None:
            wait = min(wait, max(0.0, next_at - now))
        return wait

    def _drain(self, signals: _Signals) -> None:
        """Let each worker finish its chunk; kill those that take too long, or all of them on another Ctrl-C.

        The gateway ends first: it needs the workers for the requests in flight.
        """
        if self._gateway is not None:
            self._gateway.stop(signals.wait, lambda: signals.kill)
        running = [(place, place.process) for place in self._places if place.process is not None]
        for _, process in running:
            process.terminate()
        if running:
            log.info("stopping: each worker finishes the chunk that it encodes; Ctrl-C again kills them")
        deadline = time.monotonic() + self._pace.drain_s
        while running:
            kill = signals.kill or time.monotonic() > deadline
            for place, process in running:
                if kill and process.poll() is None:
                    process.kill()
                    self._release(place, process.wait(), by_us=True)
                    log.warning("killed, for it had not ended by itself", extra=place.fields)
                elif (status := process.poll()) is not None:
                    self._release(place, status)
                    level = logging.INFO if status in (0, -signal.SIGTERM) else logging.ERROR
                    log.log(level, "%s", how_it_ended(status), extra=place.fields)
            running = [(place, process) for place, process in running if place.process is not None]
            if running:
                signals.wait(_POLL_S)


class _Signals:
    """A context that catches SIGTERM and Ctrl-C, and wakes a loop for them and for the end of a child.

    Attributes:
        stop: SIGTERM or Ctrl-C has come.
        kill: Ctrl-C has come after that.
    """

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
