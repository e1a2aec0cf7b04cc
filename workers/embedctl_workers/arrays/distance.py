"""The distance between vectors and reference vectors of the same texts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embedctl_config.hardware import Thresholds
from embedctl_workers.arrays.tokens import Vectors

_Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """How far vectors are from reference vectors of the same texts."""

    #: largest difference of a component, with both vectors scaled to unit length; NaN if one holds NaN
    max_abs_error: float
    #: smallest and mean cosine over the texts
    min_cosine: float
    mean_cosine: float
    length_error: float  #: largest relative difference in length
    worst: int  #: the row that differs most

    def within(self, bounds: Thresholds, length_error: float = math.inf) -> bool:
        """Whether every figure is within bounds; NaN never is."""
        return (
            self.max_abs_error <= bounds.max_abs_error
            and self.min_cosine >= bounds.min_cosine
            and self.mean_cosine >= bounds.mean_cosine
            and self.length_error <= length_error
        )


def measure(vectors: Vectors, references: Vectors) -> Measured:
    """Compare vectors of any length row by row; both are float32, texts × dimensions, of one shape, else ValueError."""
    if vectors.shape != references.shape:
        raise ValueError(f"vectors of shape {vectors.shape} can't be compared with {references.shape}")
    found, found_length = _split(vectors)
    expected, expected_length = _split(references)
    apart = np.abs(found - expected).max(axis=1)
    cosines = (found * expected).sum(axis=1)
    return Measured(
        max_abs_error=float(apart.max()),
        min_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        length_error=float(np.abs((found_length - expected_length) / _or_one(expected_length)).max()),
        worst=int(np.argmax(apart)),  # a row of NaN counts as the largest
    )


def _split(vectors: Vectors) -> tuple[_Float64, _Float64]:
    """Directions and lengths, float64; the direction of a vector of length 0 is the vector itself."""
    exact = vectors.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1)
    return exact / _or_one(lengths)[:, None], lengths


def _or_one(lengths: _Float64) -> _Float64:
    return np.where(lengths == 0, 1, lengths)
