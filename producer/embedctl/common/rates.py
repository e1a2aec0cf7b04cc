"""How fast counts grow, smoothed for display, and how long the rest takes."""

from __future__ import annotations

from collections import deque

#: A rate is an average over this time (seconds).
OVER_S = 15.0
#: A shorter time gives no useful rate (seconds).
_LEAST_S = 1.0
#: Counts are remembered no more often than this (seconds).
_SPACING_S = 0.1


class Rate:
    """How fast counts grow, by their differences over the last :data:`OVER_S` seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()

    def add(self, now: float, *counts: int) -> tuple[float, ...] | None:
        """Note the counts at a moment (seconds, by a clock that only goes forward). Returns the growth of each per
        second, or None if no growth is visible yet."""
        if not self._samples or now - self._samples[-1][0] >= _SPACING_S:
            self._samples.append((now, counts))
        while now - self._samples[0][0] > OVER_S:
            self._samples.popleft()
        then, before = self._samples[0]
        if now - then < _LEAST_S or counts == before:
            return None
        # A count goes down if Redis lost results.
        return tuple(max(0.0, (count - earlier) / (now - then)) for count, earlier in zip(counts, before, strict=True))


def seconds_left(remaining: int, per_s: float | None) -> float | None:
    """How long this many more take at a rate; None if the rate is unknown or 0."""
    return remaining / per_s if per_s else None
