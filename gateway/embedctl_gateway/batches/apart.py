"""Batches run in a process of their own, which gives way to others: what they parse, hash and write takes no time from
requests."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from embedctl_gateway.http.refusals import log_failure

log = logging.getLogger(__name__)

#: Where CPUs are short, it has about a tenth of the time of a process that answers requests.
_NICENESS = 10


class Runs(Protocol):
    """What runs batches: threads of this process, or of another one."""

    def start(self) -> None: ...

    def wake(self) -> None:
        """Look for a batch now."""

    def stop(self) -> None:
        """End soon."""


class Apart:
    """A runner in a child of this process, which has one thread only at that time. The child ends with its parent,
    however that ends: it reads a pipe that the parent holds open. If the child ends first, `lost` is called, in another
    thread."""

    def __init__(self, runner: Runs, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._stopping = threading.Event()
        reading, self._pipe = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._pipe)
            _run(runner, reading)
        os.close(reading)
        self._watching = threading.Thread(target=self._watch, name="batches", daemon=True)
        self._watching.start()

    def start(self) -> None:
        """It runs already: a process with several threads could not be forked."""

    def wake(self) -> None:
        """Let it look for batches now."""
        with suppress(OSError):  # it has ended
            os.write(self._pipe, b".")

    def stop(self) -> None:
        """End it soon, and wait for that."""
        if not self._stopping.is_set():
            self._stopping.set()
            os.close(self._pipe)
        self._watching.join()

    def _watch(self) -> None:
        os.waitpid(self._child, 0)
        if not self._stopping.is_set():
            log.error("the process that runs batches has ended, and the gateway ends with it")
            self._lost()


def give_way(niceness: int = _NICENESS) -> None:
    """Leave CPUs to others that want them: to those of this process group, and, where Linux shares CPUs among sessions
    first, to all sessions. There, niceness alone says nothing to another session, such as Redis'."""
    os.setsid()
    os.nice(niceness)
    with suppress(OSError):  # there are no such groups
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="ascii")


def _run(runner: Runs, reading: int) -> None:
    """In the child: run batches until the parent has closed the pipe."""
    try:
        for each in (signal.SIGINT, signal.SIGTERM):  # a terminal, or a service manager, tells both
            signal.signal(each, signal.SIG_IGN)
        give_way()
        runner.start()
        while os.read(reading, 4096):
            runner.wake()
        runner.stop()
    except BaseException as error:  # noqa: BLE001  (no code of the parent's is to go on here)
        log_failure("the process that runs batches met", error)
        os._exit(1)
    os._exit(0)
