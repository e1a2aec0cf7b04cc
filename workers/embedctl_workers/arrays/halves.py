"""Vectors in float16, for jobs whose class promises 16 bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embedctl_workers.arrays.tokens import Vectors

#: Rounding a vector to float16 changes it by at most this part of its length.
LARGEST_CHANGE = 2.0**-10
#: Float16's least normal number; below it, the distance of neighbours is that of this number's (IEEE 754, binary16).
_LEAST_NORMAL = 2.0**-14
#: Half of the largest power of two in float16, so that a sum in float32 may be off by its own rounding.
_LONGEST = 2.0**14


def halved(vectors: Vectors) -> npt.NDArray[np.float16] | None:
    """Vectors (float32, records × dim) as float16, little-endian; None if that might change one by over LARGEST_CHANGE.

    A vector v of d components changes by at most 2^-10.5 of its length if √d × 2^-14 ≤ |v|, because a component changes
    by at most 2^-11 of itself or, below 2^-14, by 2^-25: in sum by √(2^-22 |v|² + d 2^-50). A vector of unit length
    always is within, and so is a row of NaN, which stays one.
    """
    squares = np.einsum("ij,ij->i", vectors, vectors)
    outside = (squares < vectors.shape[1] * _LEAST_NORMAL**2) | (squares > _LONGEST**2)
    return None if outside.any() else vectors.astype("<f2")


def rounded(vectors: Vectors) -> Vectors:
    """The vectors as a reader finds them after :func:`halved`, float32, records × dim."""
    halves = halved(vectors)
    return vectors if halves is None else halves.astype(np.float32)
