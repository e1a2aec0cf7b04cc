"""How fast a worker encodes a model; its heartbeat reports it."""

from __future__ import annotations

from dataclasses import dataclass

#: Weight of the newest chunk.
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates while the device works, smoothed over the last chunks; all 0 before the first.

    Attributes:
        padding: the share of padding in what the device was given, 0 to 1.
    """

    tokens_per_s: float = 0.0
    rows_per_s: float = 0.0
    padding: float = 0.0

    def after(self, *, rows: int, tokens: int, positions: int, seconds: float) -> Speed:
        """The speed after one more chunk.

        Args:
            tokens: without padding.
            positions: with padding.
        """
        seconds = max(1e-6, seconds)
        newest = Speed(tokens / seconds, rows / seconds, 1 - tokens / positions if positions else 0.0)
        if self == Speed():
            return newest

        def mean(before: float, now: float) -> float:
            return before + _WEIGHT * (now - before)

        return Speed(
            mean(self.tokens_per_s, newest.tokens_per_s),
            mean(self.rows_per_s, newest.rows_per_s),
            # A chunk that gave the device nothing says nothing about padding.
            mean(self.padding, newest.padding) if positions else self.padding,
        )
