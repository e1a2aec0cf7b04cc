"""The spread of a figure that was measured several times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of a figure."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one or more values."""
        return cls(statistics.median(values), min(values), max(values))

    def times(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * factor, self.least * factor, self.most * factor)

    def as_json(self) -> dict[str, float]:
        return asdict(self)

    def __format__(self, form: str) -> str:
        """`1.05 (0.99 to 1.10)`, each figure in this form."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"
