"""Runs commands and workers as forks of a process that has imported embedctl. Each starts in a tenth of the time.

Otherwise a fork is like a new process: it has its own variables, folder, standard streams, session and exit status, and
no code of embedctl has run in it before. Changes through PYTHONPATH need a fresh Python. So do workers with a model,
because their libraries read variables while they load.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

_PRELOADED = [
    "celery.worker.consumer",
    "kombu.transport.redis",
    "embedctl.cli",
    "embedctl_workers.commands.worker",
    "embedctl_workers.serving.lifecycle",
    "embedctl_workers.backends.dummy",
    __name__,
]


def can_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables would import the same modules as this one."""
    return environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")


@dataclass(frozen=True)
class _Call:
    """The command that a fork runs, and its surroundings."""

    worker: bool
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    out: Path
    err: Path


class Forked:
    """A fork, with those parts of :class:`subprocess.Popen` that tests use.

    Args:
        arguments: of the command line `embedctl`, or of a worker.
        worker: which of them; a worker must be one of the backend `dummy`.
        out: the file for standard output.
        err: the file for standard error; may be the same.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        out: Path,
        err: Path,
        *,
        worker: bool,
    ) -> None:
        self.args = list(arguments)
        call = _Call(worker, self.args, dict(environment), folder, out, err)
        self._process: ForkServerProcess = _server().Process(target=_run, args=(call,), daemon=True)
        self._process.start()
        assert self._process.pid
        self.pid: int = self._process.pid

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
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, *, worker: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command line, or a worker's command line, to its end.

    Raises:
        subprocess.TimeoutExpired: the process has not ended after two minutes, and is killed.
    """
    with tempfile.TemporaryDirectory() as own:
        out, err = Path(own, "out"), Path(own, "err")
        process = Forked(arguments, environment, folder, out, err, worker=worker)
        try:
            status = process.wait(120)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, status, out.read_text(), err.read_text())


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run(call: _Call) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(call.environment)
    os.chdir(call.folder)
    for number, path in ((1, call.out), (2, call.err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    if call.worker:
        from embedctl_workers.commands.worker import main as start_worker
        from embedctl_workers.machine import devices

        # Nothing may be imported before a process is pinned, because imports fix the size of thread pools. The dummy
        # uses no thread pool.
        devices._SIZES_THREADS_AT_IMPORT = ()  # type: ignore[assignment]  # mypy takes the four names for its type
        start_worker(call.arguments, prog_name="embedctl worker")
    else:
        from embedctl.cli import main

        main(call.arguments, prog_name="embedctl")
