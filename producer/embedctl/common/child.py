"""`python child.py PARENT-PID COMMAND …`: become COMMAND, and get SIGTERM from the kernel if the parent dies.

So a `kill -9` of `embedctl run` leaves neither its Redis nor its worker behind. On Linux only; elsewhere the command
simply runs.

Python runs this file without its package, because importing that would take ten times as long as everything else here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; it survives exec


def guarded(command: Sequence[str]) -> list[str]:
    """The command line of a child process that gets SIGTERM when this process ends. Start it from the main thread: to
    the kernel, the parent is the thread that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit("the parent has ended")
    os.execvp(command[0], command)  # noqa: S606  (the whole point; an argument list, no shell)


if __name__ == "__main__":
    main()
