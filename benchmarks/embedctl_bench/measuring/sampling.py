"""Statistics of samples, and the order of turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

#: Rounds that differ by more than this share of their median are noisy.
NOISY = 0.10
#: The 99th percentile of fewer samples would be one of the two largest.
_P99_FROM = 100
_PERCENTILES = (50, 90, 99)

T = TypeVar("T")


def percentiles(samples_s: Sequence[float]) -> dict[str, float | None]:
    """`p50_ms`, `p90_ms` and `p99_ms` of durations in seconds, interpolated linearly.

    `p99_ms` is None below 100 samples; without samples all are None.
    """
    names = [f"p{each}_ms" for each in _PERCENTILES]
    if not samples_s:
        return dict.fromkeys(names)
    values = np.percentile(np.asarray(samples_s, dtype=np.float64) * 1000, _PERCENTILES)
    found: dict[str, float | None] = dict(zip(names, map(float, values), strict=True))
    return found if len(samples_s) >= _P99_FROM else {**found, "p99_ms": None}


def spread(values: Sequence[float]) -> float:
    """The largest value minus the smallest, as a share of the median; 0 for fewer than two values, NaN for median 0."""
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    return (max(values) - min(values)) / abs(middle) if middle else math.nan


def is_noisy(values: Sequence[float]) -> bool:
    """Whether rounds differ too much for their median to say much."""
    return not spread(values) <= NOISY


def least(contenders: Sequence[tuple[str, Callable[[], float]]], rounds: int) -> dict[str, float]:
    """The least figure of each name in so many rounds by turns, after one that warms up."""
    found: dict[str, float] = {}
    for number in range(1 + rounds):
        for name, measure in turn_of(contenders, number):
            figure = measure()
            if number:
                found[name] = min(found.get(name, math.inf), figure)
    return found


def turn_of(names: Sequence[T], number: int) -> Sequence[T]:
    """The order in a round. Each round reverses it, so that a drift of the machine affects all alike."""
    return names[:: -1 if number % 2 else 1]
