"""Child processes, which end with the process that started them, whatever ends that."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from embedctl.common.child import guarded

#: Time for a child to end before it is killed (seconds).
_STOP_S = 60.0


def start(command: Sequence[str], *, lock: str = "", **options: Any) -> subprocess.Popen[Any]:
    """Start a child process. Call it in the main thread: to the kernel, the parent is the thread that starts it.

    If this process is killed, the kernel ends the child. The child is in a session of its own, so that Ctrl-C reaches
    only this process, which stops its children in order. Without options of :class:`subprocess.Popen`, it reads
    nothing, and only its errors are shown.
    """
    return subprocess.Popen(
        guarded(command, lock),
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "start_new_session": True, **options},
    )


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A child process, as of :func:`start`, that is told to end when the block ends, and killed if that takes too
    long; its pipes are closed."""
    process = start(command, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        with suppress(BrokenPipeError), process:  # a pipe may hold what the child has not read
            pass
