"""Where what was built for a model and this machine is kept, and whether it may be trusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from embedctl_config.errors import ModelError
from embedctl_config.settings import Settings, expanded

_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")


def cache_folder(settings: Settings) -> Path:
    """The setting `cache_dir`, else `embedctl` in the XDG cache folder. It may not exist yet."""
    if settings.cache_dir:
        return expanded(settings.cache_dir, "cache_dir")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(base, "cache_dir") / "embedctl"


def private_folder(folder: Path) -> Path:
    """The folder, made if need be, that nobody else may write to or replace: what is in it will be executed.

    Raises:
        ModelError: somebody else may.
        OSError: it can't be made.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o755, exist_ok=True)
    wrong = _open_to_others(folder)
    if wrong is not None:
        raise ModelError(
            f"{folder} must belong to you and be writable by you alone, and those above it belong to you or root and "
            f"be writable by nobody else, but {wrong} is not so: chmod go-w {wrong}, or choose another cache_dir"
        )
    return folder


def is_trusted(path: Path) -> bool:
    """Whether a file or folder is this user's, nobody else may write to it, and nobody else may put another in its
    place.

    Raises:
        OSError: it is not there.
    """
    return _open_to_others(path) is None


@contextmanager
def locked(lock: Path) -> Iterator[IO[bytes]]:
    """A lock's file, open for `flock`, which ends with the process. Neither a link's target nor any content is touched.

    Raises:
        OSError: it is a link, or can't be made.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "r+b") as stream:
        yield stream


def _open_to_others(path: Path) -> Path | None:
    """What of a path others may change: itself, a link on the way or a folder above; None where they may nothing."""
    facts = path.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        return path
    whole = path.absolute()
    above = dict.fromkeys((*whole.parents, *path.resolve().parents))
    theirs = (each for each in (whole, *above) if each.lstat().st_uid not in _own_uids())
    return next(theirs, None) or next((folder for folder in above if _replaceable(folder)), None)


def _own_uids() -> frozenset[int]:
    """This user and root, whose files are shown as nobody's in containers in which root itself is not mapped."""
    own = {0, os.getuid()}
    try:
        mapped = [[int(word) for word in line.split()] for line in _UID_MAP.read_text().splitlines()]
        if not any(inside <= 0 < inside + count for inside, _, count in mapped):
            own.add(int(_OVERFLOW_UID.read_text()))
    except (OSError, ValueError):  # no Linux, or no /proc
        pass
    return frozenset(own)


def _replaceable(folder: Path) -> bool:
    """Whether others may rename what is in a folder; in those like /tmp they may not."""
    facts = folder.stat()
    return facts.st_uid not in _own_uids() or bool(facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX)
