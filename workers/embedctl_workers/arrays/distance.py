"""The distance between vectors and reference vectors of the same texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embedctl_config.hardware import Thresholds
from embedctl_workers.arrays.tokens import Vectors

#: Vectors, one after the other; perhaps the rows of a matrix.
Rows = Sequence[Vectors] | Vectors
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


def measure(vectors: Rows, references: Rows) -> Measured:
    """Compare vectors of any length row by row, float32, each with its reference; ValueError if one has another
    shape."""
    figures = np.array([_figures(*each) for each in zip(vectors, references, strict=True)])
    apart, cosines, lengths = figures.T
    return Measured(
        max_abs_error=float(apart.max()),
        min_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        length_error=float(lengths.max()),
        worst=int(np.argmax(apart)),  # a row of NaN counts as the largest
    )


def _figures(vector: Vectors, reference: Vectors) -> tuple[float, float, float]:
    """The largest difference of a component, the cosine, and the relative difference in length."""
    if vector.shape != reference.shape:
        raise ValueError(f"a vector of shape {vector.shape} can't be compared with one of {reference.shape}")
    (found, found_length), (expected, length) = _split(vector), _split(reference)
    apart = np.abs(found - expected).max(initial=0)
    cosine = float(found @ expected) if found_length or length else 1.0
    return float(apart), cosine, abs(found_length - length) / (length or 1)


def _split(vector: Vectors) -> tuple[_Float64, float]:
    """Direction, float64, and length; the direction of a vector of length 0 is the vector itself."""
    exact = vector.astype(np.float64)
    length = float(np.linalg.norm(exact))
    return exact / (length or 1), length
