"""Files that survive: written whole or not at all, and held by one process of a machine at a time."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: What a file system answers that can't sync a folder, or a folder that may be written to but not read.
_CANT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
#: Some file systems have no hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
log = logging.getLogger(__name__)


def publish(fresh: Path, path: Path, *, replace: bool = True) -> None:
    """Sync a file or folder, give it its final name beside it, and sync the folder: only then does the name last.

    What has the name already is replaced. Without `replace`, it stays, also if it was published just now, and
    FileExistsError is raised. After another OSError, of a disk that fails, the file may have either name.
    """
    if fresh.is_dir():
        sync_folder(fresh)
    else:
        with fresh.open("rb") as stream:
            os.fsync(stream.fileno())
    if replace:
        fresh.replace(path)
    else:
        _move_exclusively(fresh, path)
    sync_folder(path.parent)


def write(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Write or replace a file. A process that is killed meanwhile leaves the previous file, or none.

    A link at this path is replaced, and its target is not touched. The file has these permissions (`mode`), whatever
    the umask; None: what the umask leaves of 0666.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # two processes may write one path at a time
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(scratch, flags, 0o666 if mode is None else mode), "wb") as stream:
            stream.write(data)
        if mode is not None:
            scratch.chmod(mode)
        publish(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, if there is one, so that it does not come back after the power failed."""
    with suppress(FileNotFoundError):
        path.unlink()
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's names to the disk, where the file system can do that; raises OSError if the disk fails."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANT_SYNC:
            raise


def _move_exclusively(fresh: Path, path: Path) -> None:
    try:
        os.link(fresh, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Whoever makes the name has it, empty until the next line.
        if fresh.is_dir():
            path.mkdir()
        else:
            path.touch(exist_ok=False)
        fresh.replace(path)
    else:
        fresh.unlink()


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
