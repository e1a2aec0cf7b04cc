"""Runs commands and workers as forks of a process that has imported embedctl. Each starts in a tenth of the time.

Otherwise a fork is like a new process: it has its own variables, folder, standard streams, session and exit status, and
no code of embedctl has run in it before. Changes through PYTHONPATH need a fresh Python: in a fork, modules have their
names from one another already, so a change would miss some of them, and a test pass without its fault. So do workers
with a model, because their libraries read variables while they load, and tests of how Python itself starts and ends. A
fork can be changed by `prepare`, if the test fails where the change is missed.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import TracebackType
from typing import IO, Any, Self

_PRELOADED = [
    "celery.worker.consumer",
    "kombu.transport.redis",
    "embedctl.cli",
    "embedctl_workers.commands.worker",
    "embedctl_workers.serving.lifecycle",
    "embedctl_workers.backends.dummy",
    "embedctl_workers.commands.up",
    "embedctl_gateway.serve",
    # What commands import as they need it, where it is installed. LanceDB itself starts a thread, which no fork has: so
    # only the most of what it imports is here.
    "orjson",
    "sqlite3",
    "s3fs",
    "aiobotocore.session",
    "qdrant_client",
    "pandas",
    "pyarrow.dataset",
    "embedctl.changes.cache",
    "embedctl.changes.update",
    "embedctl.output.parquet",
    "embedctl.sinks.postgresql",
    "embedctl.sinks.qdrant",
    "lance_namespace",
    "deprecation",
    "overrides",
    "tqdm",
    "tests.support.prepared",
    __name__,
]


#: Commands that become another program, and its module.
_PROGRAMS = {
    "gateway": "embedctl_gateway.__main__",
    "model": "embedctl_workers.commands.model",
    "up": "embedctl_workers.commands.up",
    "worker": "embedctl_workers.commands.worker",
}


def can_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables would import the same modules as this one."""
    return environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")


class _Descriptor:
    """A file descriptor that goes to the fork."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


@dataclass(frozen=True)
class _Call:
    """The command that a fork runs, and its surroundings: its standard streams are in their order."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path | None
    streams: Sequence[_Descriptor]
    prepare: Callable[[], None] | None


class Forked:
    """A fork, with those parts of :class:`subprocess.Popen` that tests use.

    Args:
        arguments: of the command line `embedctl`. A worker must be one of the backend `dummy`.
        folder: the one that it runs in; None is this process' own.
        out: where standard output goes: a file's path, to whose end it is written, or what Popen takes.
        err: the same for standard error.
        stdin: what Popen takes.
        prepare: what the fork runs before the command; it is pickled.

    Attributes:
        stdin, stdout, stderr: our ends of the pipes, for text.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None,
        out: Path | int = PIPE,
        err: Path | int = PIPE,
        *,
        stdin: int = DEVNULL,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        assert can_be_forked(environment), "a fork does not see what PYTHONPATH changes"
        self.args = list(arguments)
        theirs: list[int] = []
        self.stdin = self._stream(theirs, stdin, "w")
        self.stdout = self._stream(theirs, out, "r")
        self.stderr = self._stream(theirs, err, "r")
        call = _Call(self.args, dict(environment), folder, [_Descriptor(number) for number in theirs], prepare)
        self._process: ForkServerProcess = _server().Process(target=_run, args=(call,), daemon=True)
        self._process.start()
        for number in theirs:
            os.close(number)
        assert self._process.pid
        self.pid: int = self._process.pid

    @staticmethod
    def _stream(theirs: list[int], wanted: Path | int, mode: str) -> IO[str] | None:
        """Add the fork's end of a stream; return ours, if it is a pipe."""
        if isinstance(wanted, Path):
            theirs.append(os.open(wanted, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        elif wanted == DEVNULL:
            theirs.append(os.open(os.devnull, os.O_RDWR))
        elif wanted != PIPE:
            theirs.append(os.dup(wanted))
        else:
            ends = os.pipe()
            theirs.append(ends[mode == "r"])
            return os.fdopen(ends[mode != "r"], mode, encoding="utf-8", errors="replace")
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self.wait()

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: the process has not ended by then.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def communicate(self, given: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """What it says through its pipes until it ends.

        Raises:
            subprocess.TimeoutExpired: the process has not ended by then.
        """
        with ThreadPoolExecutor(2) as pool:
            said = [pool.submit(stream.read) if stream else None for stream in (self.stdout, self.stderr)]
            if self.stdin is not None:
                with suppress(BrokenPipeError), self.stdin:
                    self.stdin.write(given or "")
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()  # or nothing would end the reading
                raise
        out, err = ("" if each is None else each.result() for each in said)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


#: A process that a test started, either way.
Process = subprocess.Popen[bytes] | Forked


def run_forked(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    stdin: str | None = None,
    prepare: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end.

    Raises:
        subprocess.TimeoutExpired: the process has not ended after two minutes, and is killed.
    """
    with tempfile.TemporaryDirectory() as own:
        out, err, given = Path(own, "out"), Path(own, "err"), Path(own, "in")
        given.write_text(stdin or "")
        with given.open() as stream:
            process = Forked(arguments, environment, folder, out, err, stdin=stream.fileno(), prepare=prepare)
        try:
            status = process.wait(120)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, status, out.read_text(), err.read_text())


def status_of_fork(function: Callable[..., None], *given: Any) -> int:
    """The exit status of a fork that calls a function; both are pickled."""
    process = _server().Process(target=function, args=given, daemon=True)
    process.start()
    process.join(120)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run(call: _Call) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(call.environment)
    if call.folder is not None:
        os.chdir(call.folder)
    for number, stream in enumerate(call.streams):
        os.dup2(stream.number, number)
        os.close(stream.number)
    if os.isatty(0):
        # Ctrl-C is a signal only to those whose terminal it is typed at.
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    if call.prepare is not None:
        call.prepare()
    name, *others = call.arguments
    if name == "worker":
        from embedctl_workers.machine import devices

        # Nothing may be imported before a process is pinned, because imports fix the size of thread pools. The dummy
        # uses no thread pool.
        devices._SIZES_THREADS_AT_IMPORT = ()  # type: ignore[assignment]  # mypy takes the four names for its type
    if name in _PROGRAMS:
        import_module(_PROGRAMS[name]).main(others, prog_name=f"embedctl {name}")
    else:
        from embedctl.cli import main

        main(call.arguments, prog_name="embedctl")
