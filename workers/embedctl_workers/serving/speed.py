"""How fast a worker encodes a model; its heartbeat reports it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

#: Weight of the newest chunk.
_WEIGHT = 0.2
#: A chunk of at least this many tokens, or of a second's work, tells how fast a worker is with large chunks. Of a
#: smaller one, the time of each call is too large a part.
_LARGE = 4096
#: Chunks of one batch end at almost the same time. They count together, once this much time is known (seconds).
_LEAST_S = 1e-3


@dataclass(frozen=True, slots=True)
class Work:
    """What was encoded: `tokens` without padding, `positions` with it."""

    rows: int = 0
    tokens: int = 0
    positions: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.rows + other.rows, self.tokens + other.tokens, self.positions + other.positions)


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates while the device works, smoothed over the last chunks; all 0 before the first.

    `padding` is its share in what the device was given, 0 to 1, `sustained_tokens_per_s` the rate of large chunks
    alone; 0 before the first one.
    """

    tokens_per_s: float = 0.0
    rows_per_s: float = 0.0
    padding: float = 0.0
    sustained_tokens_per_s: float = 0.0

    def after(self, work: Work, seconds: float) -> Speed:
        tokens, positions = work.tokens, work.positions
        known = self.sustained_tokens_per_s
        sustained = tokens / seconds if tokens >= min(_LARGE, known or _LARGE) else known
        newest = Speed(tokens / seconds, work.rows / seconds, 1 - tokens / positions if positions else 0.0, sustained)
        if self == Speed():
            return newest

        def mean(before: float, now: float) -> float:
            return before + _WEIGHT * (now - before)

        return Speed(
            mean(self.tokens_per_s, newest.tokens_per_s),
            mean(self.rows_per_s, newest.rows_per_s),
            # A chunk that gave the device nothing says nothing about padding.
            mean(self.padding, newest.padding) if positions else self.padding,
            mean(known or sustained, sustained),
        )


class SpeedMeter:
    """Measures the speed of a worker, by model, whose threads encode chunks at the same time."""

    def __init__(self, models: Iterable[str]) -> None:
        self.speed: dict[str, Speed] = dict.fromkeys(models, Speed())
        self._lock = threading.Lock()
        self._ended = 0.0
        self._uncounted = dict.fromkeys(self.speed, (Work(), 0.0))

    def encoded(self, model: str, work: Work, *, began: float, ended: float) -> None:
        """A chunk was encoded between these times of the monotonic clock; `began` is 0 if the device was not used."""
        with self._lock:
            first = self.speed[model] == Speed()
            # The last batches of the previous chunk may still have been in flight when this one began. Of a model's
            # first chunk, the rest could be a moment, and the speed far too high.
            since = began if first else max(began, self._ended)
            seconds = ended - since if began else 0.0
            self._ended = ended
            earlier, earlier_s = self._uncounted[model]
            work, seconds = earlier + work, earlier_s + seconds
            if seconds < (0 if first and began else _LEAST_S):
                self._uncounted[model] = work, seconds
            else:
                self._uncounted[model] = Work(), 0.0
                self.speed[model] = self.speed[model].after(work, max(1e-6, seconds))
