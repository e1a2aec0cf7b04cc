"""Child processes: run to the end, or kept and asked by lines of JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from embedctl.common.processes import start
from embedctl_config.errors import WorkerError

#: The longest that one answer may take (seconds): an artefact may have to be built first.
_ANSWER_S = 3600
#: The longest that a process may take to end: it may have a Redis and workers to stop (seconds).
_END_S = 60


class Unavailable(WorkerError):
    """Raised when a system can't be measured; the message says why, on one line."""


class ChildProcess:
    """A process that gives one line of JSON for each line of JSON that it gets.

    It leads a session of its own, and ends when this process does. Start it from the main thread.

    Attributes:
        closed: whether it was ended; it is also ended when it dies or does not answer.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        """Start it, with these variables besides our own. The log gets everything that it writes to standard error."""
        self.closed = False
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            self._process = start(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**os.environ, **variables},
                text=True,
            )
        self._busy = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer, as :meth:`answer`."""
        self.send(**request)
        return self.answer()

    def send(self, **request: Any) -> None:
        """Send a request, whose answer is to be waited for before the next one is sent."""
        assert self._process.stdin
        self._busy = True
        with suppress(BrokenPipeError):  # answer() will say that it died
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def fileno(self) -> int:
        """That of its answers, so that several processes can be waited for at once."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the last request, or for what the process says first; raises Unavailable if the
        request failed, or if the process died or did not answer in time, which closes it."""
        assert self._process.stdout
        answering([self])
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise Unavailable(f"its process ended: {last_line(self._log.read_bytes())}")
        self._busy = False
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def close(self) -> None:
        """End the process: in its own time if that is not too long, then by force, with all that it started."""
        if self.closed:
            return
        self.closed = True
        if self._busy:
            self._signal(signal.SIGINT)
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=_END_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def answering(processes: Sequence[ChildProcess]) -> list[ChildProcess]:
    """Wait until some of the processes answer or have died: those. If it takes too long, all are closed, and
    Unavailable is raised."""
    ready: list[ChildProcess] = select.select(processes, [], [], _ANSWER_S)[0]
    if not ready:
        for process in processes:
            process.close()
        raise Unavailable(f"no answer within {_ANSWER_S} s")
    return ready


def run(command: list[str | Path], log: Path, *, timeout: float, variables: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, with these variables besides our own, and its output in a log. Unavailable, with the
    log's last line, says that it failed or took longer than `timeout` seconds."""
    with log.open("wb") as stream:
        try:
            status = subprocess.run(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
                env={**os.environ, **(variables or {})},
            ).returncode
        except subprocess.TimeoutExpired:
            raise Unavailable(f"took more than {timeout:.0f} s ({log})") from None
    if status:
        raise Unavailable(f"{last_line(log.read_bytes())} ({log})")


def last_line(log: bytes) -> str:
    """The last line with text in it, which is the error in a traceback; at most 300 characters."""
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was logged"
