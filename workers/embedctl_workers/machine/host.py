"""The part of a machine that a process may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """What a backend may use of this machine.

    Attributes:
        threads: compute threads; the process is pinned already.
        cache: the folder that keeps what was built for this machine.
        build: whether to build what is not in the cache, or to refuse.
    """

    threads: int
    cache: Path
    build: bool = True
