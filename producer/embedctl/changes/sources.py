"""Where vectors may come from, other than from a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sources:
    """Where to look for vectors before they are encoded.

    Attributes:
        earlier: whether in the output that is to be replaced.
        cache: a path or a URL.
        at_least: whether the cache may answer with a better precision.
        force: encode everything, and read neither.
    """

    earlier: bool = False
    cache: str | None = None
    at_least: bool = False
    force: bool = False
