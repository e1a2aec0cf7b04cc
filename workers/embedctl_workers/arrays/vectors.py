"""Post-processing that a job may ask for: averaging windows, scaling to unit length."""

from __future__ import annotations

import numpy as np

from embedctl_workers.arrays.tokens import Rows, Vectors

_LEAST_LENGTH = 1e-12


def mean_of_windows(vectors: Vectors, text: Rows, weights: Rows) -> Vectors:
    """The weighted mean of each text's windows, float32, texts × dim; NaN if one of them is.

    The vectors are float32, windows × dim, ordered as in :class:`~embedctl_workers.arrays.tokens.Windows`. `text` and
    `weights`, int64, say for each window the text that it is a part of, and its weight, which does not matter for a
    text's only one.
    """
    texts = int(text.max(initial=-1)) + 1
    alone = np.bincount(text, minlength=texts) == 1
    weights = np.where(alone[text], 1, weights)
    sums = vectors[:texts] * weights[:texts, np.newaxis].astype(np.float64)
    np.add.at(sums, text[texts:], vectors[texts:] * weights[texts:, np.newaxis].astype(np.float64))
    means: Vectors = (sums / np.bincount(text, weights, texts)[:, np.newaxis]).astype(np.float32)
    return means


def unit(vectors: Vectors) -> Vectors:
    """Vectors scaled to unit length, float32; a vector of length 0 stays as it is."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # the caller looks for vectors that overflowed
        units: Vectors = (vectors / np.maximum(lengths, _LEAST_LENGTH)).astype(np.float32)
    return units
