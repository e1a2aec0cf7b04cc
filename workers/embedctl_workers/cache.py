"""Where what was built for a model and this machine is kept, and whether it may be trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from embedctl_config.errors import ModelError
from embedctl_config.settings import Settings


def cache_folder(settings: Settings) -> Path:
    """The setting `cache_dir`, else `embedctl` in the XDG cache folder. It may not exist yet."""
    if settings.cache_dir:
        return Path(settings.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "embedctl"


def private_folder(folder: Path) -> Path:
    """The folder, made if need be, that nobody else may write to: what is in it will be executed.

    Raises:
        ModelError: somebody else may.
        OSError: it can't be made.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not is_trusted(folder):
        raise ModelError(
            f"{folder} must belong to you and be writable by you alone, and be in no folder that everybody may write "
            f"to: chmod go-w {folder}, and those above it"
        )
    return folder


def is_trusted(path: Path) -> bool:
    """Whether a file or folder is this user's, nobody else may write to it, and not everybody may put another in its
    place.

    Raises:
        OSError: it is not there.
    """
    facts = path.stat()
    own = facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    return own and not any(_replaceable(folder) for folder in path.resolve().parents)


def _replaceable(folder: Path) -> bool:
    """Whether everybody may rename what is in a folder; not so in those like /tmp."""
    mode = folder.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
