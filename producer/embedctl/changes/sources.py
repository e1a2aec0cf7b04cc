"""Where vectors may come from, other than from a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sources:
    """Where to look for vectors before they are encoded.

    Attributes:
        since: the path of an earlier output.
        cache: a path or a URL.
        at_least: whether the cache may answer with a better precision.
        force: encode everything, and read neither.
    """

    since: str | None = None
    cache: str | None = None
    at_least: bool = False
    force: bool = False
