"""Files that one process of a machine holds at a time."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def locked(path: Path, *, holder: str = "", vanishes: bool = False, taken: Exception | None = None) -> Iterator[None]:
    """Hold the lock of a file, which is made if there is none. The kernel releases it when the process ends.

    Args:
        path: the lock's own file; its folder exists. Raises OSError if it can't be made, or is a link, which is not
            followed.
        holder: what a process does that holds the lock, for the log, and then this one waits for it; empty: no wait.
        vanishes: remove the file in the end.
        taken: raised if another process holds the lock, and this one does not wait; a BlockingIOError if None.
    """
    from filelock import FileLock, Timeout  # takes 60 ms, and most commands hold no lock

    path.parent.stat()  # a lock makes no folder: a share that is not mounted may come back in its place
    # Without flock, its presence would lock, also after its holder was killed.
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if not holder:
            raise taken or BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path)) from None
        log.info("another process %s: waiting for it", holder)
        lock.acquire()
    try:
        yield
    finally:
        if vanishes:  # while it is held: a process that waits for it notices that, and makes another one
            path.unlink(missing_ok=True)
        lock.release()
