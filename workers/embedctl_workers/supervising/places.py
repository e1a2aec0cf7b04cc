"""The places of a supervisor: a worker or the gateway, each with a process that is started again when it dies."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from embedctl.common import processes
from embedctl_config import keys
from embedctl_config.errors import WorkerError
from embedctl_config.settings import ENV_PREFIX
from embedctl_workers.machine import tally
from embedctl_workers.machine.cgroup import killed_for_memory
from embedctl_workers.supervising.plan import PlannedWorker
from embedctl_workers.supervising.registry_link import RegistryLink
from embedctl_workers.supervising.restarts import HOPELESS, Pace, Restarts, how_it_ended, makes_suspect

#: The name that everybody's logs have.
log = logging.getLogger("embedctl_workers.supervising.supervisor")

#: How often a process is looked at that becomes ready or that was told to end (seconds).
POLL_S = 0.25
#: The longest time that a worker in quarantine may take to load its models (seconds). And so long after a death, one
#: that runs has found what is suspect.
_LOADS_S, _FOUND_S = 120.0, 30.0
#: How the line begins that the gateway prints when it listens.
_LISTENS = "the gateway is at "


class Place(ABC):
    """A process, or the pause before the next one. All methods are for the main thread: the kernel ties a child to it.

    `restarts` tells when the next process may start, and whether this one is ready. `process` is None while none runs;
    it may take `grace_s` seconds to end once it is told to.
    """

    def __init__(self, restarts: Restarts, grace_s: float) -> None:
        self.restarts = restarts
        self.grace_s = grace_s
        self.process: subprocess.Popen[Any] | None = None
        self._started_at = 0.0
        self._killed_for_memory = 0

    @property
    def settled(self) -> bool:
        """Whether it is known if the process becomes ready."""
        return self.restarts.ready_at is not None or self.restarts.given_up is not None

    def pause(self) -> float | None:
        """Seconds until there is something to do that no signal announces; None: there is nothing."""
        if self.restarts.given_up is not None:
            return None
        if self.process is None:
            return max(0.0, self.restarts.next_at - time.monotonic())
        return None if self.settled else POLL_S

    def tend(self) -> None:
        """See whether the process lives and is ready; start the next one once its pause is over."""
        if self.process is None:
            if self.restarts.given_up is None and time.monotonic() >= self.restarts.next_at:
                self.start()
        elif (status := self.process.poll()) is not None:
            self._on_exit(status)
        else:
            self._killed_for_memory = killed_for_memory()
            if self.restarts.ready_at is None:
                self._look()

    def start(self) -> None:
        self._started_at = time.monotonic()
        self._killed_for_memory = killed_for_memory()
        self.restarts.on_start()
        self.process = self._spawn()

    def release(self, status: int, *, by_us: bool = False) -> None:
        """Take note that the process has ended, perhaps killed `by_us`, the supervisor."""
        self.process = None

    @abstractmethod
    def say(self, level: int, message: str, *values: object) -> None:
        """Log something about the process."""

    @abstractmethod
    def _spawn(self) -> subprocess.Popen[Any]: ...

    @abstractmethod
    def _look(self) -> None:
        """See whether the process is ready."""

    def _tally(self) -> tuple[int, int]:
        """How many chunks the process had in hand when it ended, and how many it had completed."""
        return 0, 0

    def how(self, status: int) -> str:
        """How the process ended, in words, just after its end."""
        return how_it_ended(status, memory_ran_out=killed_for_memory() > self._killed_for_memory)

    def _on_exit(self, status: int) -> None:
        how, restarts = self.how(status), self.restarts
        held, completed = self._tally()
        self.release(status)
        pause = restarts.on_exit(status, time.monotonic(), held=held, completed=completed)
        if held and not pause:
            self.say(logging.ERROR, "%s with %d chunks in hand; starting it again at once", how, held)
        elif restarts.given_up is None:
            self.say(logging.ERROR, "%s; starting it again in %g s", how, pause)
            self._show(f"starts again after {pause:g} s: {how}")
        else:
            why = "and would again" if status in HOPELESS else f"{restarts.failed_starts} times in a row"
            self.say(logging.CRITICAL, "given up: %s before it was ready, %s; see its messages above", how, why)
            self._show(f"given up: {how}")

    @abstractmethod
    def _show(self, why: str) -> None:
        """Let people see why no process runs; empty if one does."""


class WorkerPlace(Place):
    """A worker of the plan, which adds to this environment and these options.

    The registry tells that it is ready, and is told how it died. If it dies with chunks in hand, its `quarantine` is
    started, which finds out which text did it.
    """

    def __init__(
        self,
        worker: PlannedWorker,
        registry: RegistryLink,
        *,
        environment: Mapping[str, str],
        options: Sequence[str],
        quarantine: QuarantinePlace | None = None,
    ) -> None:
        super().__init__(Restarts(Pace()), Pace().drain_s)
        self._worker = worker
        self._quarantine = quarantine
        self._file = tally.make_file()
        self._place = secrets.token_hex(8)  # workers of one device have the same name before they have chosen one
        self._name = f"{worker.name}@{socket.gethostname()}"  # in logs, until it has told its own
        self._registry = registry
        self._environment = environment
        self._options = options

    def release(self, status: int, *, by_us: bool = False) -> None:
        """Report that the process has ended, and whether what it held is suspect: not if the supervisor killed it."""
        assert self.process is not None
        suspect = makes_suspect(status)
        how = self.how(status) if suspect and not by_us else ""
        self._registry.report_exit(self.process.pid, None if suspect is None else how)
        super().release(status)

    def say(self, level: int, message: str, *values: object) -> None:
        log.log(level, message, *values, extra={"worker": self._name})

    def _spawn(self) -> subprocess.Popen[Any]:
        # A worker logs to standard error; what Celery prints to standard output as it stops is dropped.
        self._file.close()
        self._file = tally.make_file()
        descriptor = self._file.fileno()
        process = processes.start(
            [
                *(sys.executable, "-m", "embedctl_workers"),
                *(*self._worker.arguments, *self._options, "--tally", str(descriptor)),
            ],
            env={**self._environment, **self._worker.environment},
            pass_fds=[descriptor],
        )
        self._registry.expect(process.pid)
        self._show("")
        self.say(logging.INFO, "starting: %s", self._worker.command)
        return process

    def _show(self, why: str) -> None:
        self._registry.say_why_not(self._place, why, self._name, self._worker.hardware, self._worker.models)

    def _tally(self) -> tuple[int, int]:
        held, completed = tally.read(self._file)
        if held and self._quarantine is not None:
            self._quarantine.want()
        return held, completed

    def _look(self) -> None:
        if self.process and (row := self._registry.row_of(self.process.pid)):
            self._name = row.name
            self.restarts.on_ready(time.monotonic())
            self.say(logging.INFO, "ready after %.1f s", time.monotonic() - self._started_at)


class QuarantinePlace(WorkerPlace):
    """A worker with one thread and the lowest priority that takes what may kill a worker. It runs while there is
    any."""

    def __init__(
        self, worker: PlannedWorker, registry: RegistryLink, *, environment: Mapping[str, str], options: Sequence[str]
    ) -> None:
        super().__init__(
            replace(worker, metrics_address=""),
            registry,
            # A worker beside it has the address of the settings.
            environment={**environment, f"{ENV_PREFIX}METRICS_ADDRESS": ""},
            options=[*options, "--threads", "1", "--quarantine"],
        )
        # Each of its deaths has found a text, so none is a reason for a pause.
        self.restarts = Restarts(Pace(fruitless=sys.maxsize))
        self._queues = [keys.queue(worker.hardware, model) for model in worker.models]
        self._name = f"{worker.name}:quarantine@{socket.gethostname()}"
        # Of several supervisors with such a worker, each has a name of its own.
        self._awaited_as = f"{self._name}/{secrets.token_hex(8)}"
        self._wanted, self._wanted_at = False, 0.0

    @property
    def settled(self) -> bool:
        """True: nobody waits for it."""
        return True

    def want(self) -> None:
        """Start it, if it does not run."""
        self._wanted, self._wanted_at = True, time.monotonic()
        if self.restarts.given_up is None and (self.process is None or self.restarts.ready_at is None):
            self._announce(_LOADS_S)

    def _look(self) -> None:
        super()._look()
        if self.restarts.ready_at is not None:
            self._announce(0.0)  # it beats itself now

    def release(self, status: int, *, by_us: bool = False) -> None:
        """The same; and unless it found a text, so that the next process comes at once, nothing waits for it now."""
        found, _ = tally.read(self._file)
        self._announce(_LOADS_S if found and not by_us else 0.0)
        super().release(status, by_us=by_us)

    def pause(self) -> float | None:
        return super().pause() if self._wanted or self.process is not None else None

    def tend(self) -> None:
        if self.process is not None and self.process.poll() == 0:
            self.release(0)
            # There was nothing left for it to do, but perhaps it was about to end when another worker died.
            self._wanted = time.monotonic() - self._wanted_at < _FOUND_S
            if self._wanted:
                self._announce(_LOADS_S)
        elif self._wanted or self.process is not None:
            super().tend()

    def _announce(self, within_s: float) -> None:
        """Let what may kill a worker wait for the next process, so long at most."""
        self._registry.expect_quarantine(self._queues, self._awaited_as, within_s)


class GatewayPlace(Place):
    """The gateway, which is never given up. What its process prints becomes lines of our log."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        grace_s: float,
        pace: Pace | None = None,
        command: Sequence[str] = (sys.executable, "-m", "embedctl_gateway"),
    ) -> None:
        super().__init__(Restarts(pace or Pace(), gives_up=False), grace_s)
        self._environment = environment
        self._command = command

    def start_first(self) -> None:
        """Start it for the first time, and wait until it listens.

        If it ends instead, that is a WorkerError with its own message and status.
        """
        self.restarts.on_start()
        process, lines = self._spoken()
        said: list[str] = []
        for line in lines:
            said.append(line)
            if line.startswith(_LISTENS):
                break
        else:
            status = process.wait()
            told = "".join(said).strip() or how_it_ended(status)
            raise WorkerError(f"the gateway can't start: {told}", exit_code=max(1, status))
        self.process = process
        for line in said:
            self._hear(line)
        self._follow(lines)

    def say(self, level: int, message: str, *values: object) -> None:
        log.log(level, f"gateway: {message}", *values)

    def _spawn(self) -> subprocess.Popen[Any]:
        process, lines = self._spoken()
        self._follow(lines)
        return process

    def _look(self) -> None:
        """Nothing: it says that it is ready."""

    def _show(self, why: str) -> None:
        """Nothing: only workers are shown."""

    def _spoken(self) -> tuple[subprocess.Popen[str], IO[str]]:
        process = processes.start(
            self._command, stderr=subprocess.PIPE, text=True, errors="replace", env=self._environment
        )
        assert process.stderr is not None
        return process, process.stderr

    def _follow(self, lines: IO[str]) -> None:
        """Hear a process to its end, in a thread."""

        def run() -> None:
            with lines:
                for line in lines:
                    self._hear(line)

        threading.Thread(target=run, name="gateway", daemon=True).start()

    def _hear(self, line: str) -> None:
        if not line.startswith(_LISTENS):
            self.say(logging.WARNING, "%s", line.rstrip())
            return
        self.restarts.on_ready(time.monotonic())
        log.info("%s", line.partition(";")[0].rstrip())


def drain(places: Iterable[Place], how: str, wait: Callable[[float], None], is_urgent: Callable[[], bool]) -> None:
    """Let each process end by itself; kill those that take too long, or all of them once it is urgent.

    `how` says for the log what they do before they end; `wait` sleeps for some seconds, or less.
    """
    running = [(place, place.process) for place in places if place.process is not None]
    for _, process in running:
        process.terminate()
    if running:
        log.info("stopping: %s", how)
    began = time.monotonic()
    while running:
        for place, process in running:
            kill = is_urgent() or time.monotonic() - began > place.grace_s
            if kill and process.poll() is None:
                process.kill()
                place.release(process.wait(), by_us=True)
                place.say(logging.WARNING, "killed, for it had not ended by itself")
            elif (status := process.poll()) is not None:
                place.release(status)
                place.say(logging.INFO if status in (0, -signal.SIGTERM) else logging.ERROR, "%s", place.how(status))
        running = [(place, process) for place, process in running if place.process is not None]
        if running:
            wait(POLL_S)
