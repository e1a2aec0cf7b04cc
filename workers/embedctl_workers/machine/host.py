"""The part of a machine that a process may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """The resources of this machine that a backend may use."""

    threads: int  #: compute threads; the process is pinned already
    cache: Path  #: the folder that keeps what was built for this machine
    build: bool = True  #: whether to build what the cache lacks; False refuses instead
    sharing: int = 1  #: how many workers share the accelerator, this one included
    #: the CPUs of each compute thread, if each has a core of its own; else empty
    places: tuple[frozenset[int], ...] = ()
