"""Files that are still there, under their names, after the power fails."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

#: What a file system answers that can't sync a folder, or a folder that may be written to but not read.
_CANT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


def replace_durably(fresh: Path, path: Path) -> None:
    """Sync a file, give it its final name in the same folder, and sync the folder: only then does the name last.

    Raises:
        OSError: the file is missing, or the disk fails. It may then have either name.
    """
    with fresh.open("rb") as stream:
        os.fsync(stream.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def remove_durably(path: Path) -> None:
    """Remove a file, if there is one, so that it does not come back after the power failed."""
    with suppress(FileNotFoundError):
        path.unlink()
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's names to the disk, where the file system can do that.

    Raises:
        OSError: the disk fails.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANT_SYNC:
            raise
