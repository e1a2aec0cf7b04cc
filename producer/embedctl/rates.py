"""How fast counts grow, as people like to see it."""

from __future__ import annotations

from collections import deque

#: A rate is taken over the last this many seconds.
OVER_S = 15.0
#: Over less than this it would say nothing (seconds).
_LEAST_S = 1.0


class Rate:
    """How fast counts grow, by their differences over the last :data:`OVER_S` seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()

    def add(self, now: float, *counts: int) -> tuple[float, ...] | None:
        """Note the counts of a moment; what each grows by in a second, or None where nothing grew that could be seen.

        Args:
            now: seconds, by a clock that only goes forward.
        """
        self._samples.append((now, counts))
        while now - self._samples[0][0] > OVER_S:
            self._samples.popleft()
        then, before = self._samples[0]
        if now - then < _LEAST_S or counts == before:
            return None
        # A count that Redis lost results of goes down.
        return tuple(max(0.0, (count - earlier) / (now - then)) for count, earlier in zip(counts, before, strict=True))
