"""The gateway that runs beside the workers of `embedctl up`: a process of its own, started again when it dies."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from embedctl.child import guarded
from embedctl_config.errors import WorkerError
from embedctl_workers.supervising.restarts import Pace, Restarts, how_it_ended

log = logging.getLogger(__name__)

#: How the line begins that the gateway prints when it listens.
_LISTENS = "the gateway is at "
_COMMAND = (sys.executable, "-m", "embedctl_gateway")
#: How often the end of a process that was told to stop is looked for (seconds).
_POLL_S = 0.25


class GatewayProcess:
    """Runs the gateway. All methods are for the main thread, because the kernel ties a child to the thread.

    What the process prints becomes lines of our log.

    Args:
        environment: of the process.
        patience_s: how long it may take to answer what is in flight once it is told to stop (seconds).
        command: what runs it.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        patience_s: float,
        pace: Pace | None = None,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._environment = environment
        self._patience_s = patience_s
        self._command = command
        self._restarts = Restarts(pace or Pace())
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it for the first time, and wait until it listens.

        Raises:
            WorkerError: it has ended instead; with its own message and status.
        """
        process, lines = self._spawn()
        said: list[str] = []
        for line in lines:
            said.append(line)
            if line.startswith(_LISTENS):
                break
        else:
            self._process = None
            status = process.wait()
            told = "".join(said).strip() or how_it_ended(status)
            raise WorkerError(f"the gateway can't start: {told}", exit_code=max(1, status))
        for line in said:
            self._hear(line)
        self._follow(lines)

    def tend(self) -> None:
        """See whether it lives, and start it again once its pause is over. It is never given up."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._restarts.next_at:
                self._follow(self._spawn()[1])
        elif (status := self._process.poll()) is not None:
            self._process = None
            pause = self._restarts.on_exit(status, now)
            log.error("gateway: %s; starting it again in %g s", how_it_ended(status), pause)

    def next_at(self) -> float | None:
        """When it is to be started again, on the monotonic clock; None while it runs."""
        return self._restarts.next_at if self._process is None else None

    def stop(self, wait: Callable[[float], None], is_urgent: Callable[[], bool]) -> None:
        """End it; it first answers what is in flight, unless that takes too long or is urgent.

        Args:
            wait: sleeps for some seconds, or less.
        """
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        log.info("stopping: the gateway answers what is in flight; Ctrl-C again kills it")
        deadline = time.monotonic() + self._patience_s
        while process.poll() is None:
            if is_urgent() or time.monotonic() > deadline:
                process.kill()
            wait(_POLL_S)
        log.info("gateway: %s", how_it_ended(process.returncode))

    def _spawn(self) -> tuple[subprocess.Popen[str], IO[str]]:
        process = subprocess.Popen(
            guarded(self._command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(self._environment),
            start_new_session=True,  # so that Ctrl-C reaches the supervisor alone
        )
        assert process.stderr is not None
        self._process = process
        self._restarts.on_start()
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
            log.warning("gateway: %s", line.rstrip())
            return
        self._restarts.on_ready(time.monotonic())
        log.info("%s", line.partition(";")[0].rstrip())
