"""`python child.py PARENT-PID LOCK COMMAND …`: become COMMAND, and get SIGTERM from the kernel if the parent dies.

So a `kill -9` of `embedctl run` leaves neither its Redis nor its worker behind. On Linux only; elsewhere the command
simply runs. LOCK, if it is not empty, is a file that COMMAND holds locked from before its start until its end.

Python runs this file without its package, because importing that would take ten times as long as everything else here.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; it survives exec


def guarded(command: Sequence[str], lock: str = "") -> list[str]:
    """The command line of a child process that gets SIGTERM when this process ends. Start it from the main thread: to
    the kernel, the parent is the thread that starts it.

    With `lock`, it first waits until no other process holds that file's lock, and holds it itself until it has ended:
    also while it ends after this process was killed, when a lock of this process is free already.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), lock, *command]


def main() -> None:
    parent, lock, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit("the parent has ended")
    if lock:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file, True)
    os.execvp(command[0], command)  # noqa: S606  (the whole point; an argument list, no shell)


if __name__ == "__main__":
    main()
