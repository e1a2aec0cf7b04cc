"""How far vectors are from their references, as a measurement keeps it."""

from __future__ import annotations

from embedctl_workers.arrays.distance import measure
from embedctl_workers.arrays.tokens import Vectors


def distance(vectors: Vectors, references: Vectors) -> dict[str, float]:
    """`max_abs_error`, `min_cosine` and `mean_cosine` of vectors, float32, texts × dimensions.

    Raises:
        ValueError: they are not of the same shape.
    """
    found = measure(vectors, references)
    return {name: getattr(found, name) for name in ("max_abs_error", "min_cosine", "mean_cosine")}
