"""Where what was built for a model and this machine is kept."""

from __future__ import annotations

import os
from pathlib import Path

from embedctl_config.settings import Settings


def cache_folder(settings: Settings) -> Path:
    """The setting `cache_dir`, else `embedctl` in the XDG cache folder. It may not exist yet."""
    if settings.cache_dir:
        return Path(settings.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "embedctl"
