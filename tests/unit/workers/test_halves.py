"""Vectors in float16: how far they are from the vectors that they stand for, and when float16 can't hold them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl_workers.arrays.halves import LARGEST_CHANGE, halved, rounded
from embedctl_workers.arrays.tokens import Vectors


def some(rows: int, dim: int, scale: float = 1.0) -> Vectors:
    """Vectors of length `scale`."""
    vectors = np.random.default_rng(dim).standard_normal((rows, dim))
    scaled: Vectors = (scale * vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return scaled


def change(vectors: Vectors) -> float:
    """The largest change that rounding makes, as a part of a vector's length."""
    exact = vectors.astype(np.float64)
    return float((np.linalg.norm(rounded(vectors) - exact, axis=1) / np.linalg.norm(exact, axis=1)).max())


@pytest.mark.parametrize("dim", [1, 2, 384, 1024, 65_536])
def test_vectors_of_unit_length_always_fit(dim: int) -> None:
    vectors = some(3, dim)
    halves = halved(vectors)
    assert halves is not None
    assert halves.dtype.str == "<f2"
    assert change(vectors) <= LARGEST_CHANGE
    assert np.abs(rounded(vectors) - vectors).max() <= 2**-12


@given(st.integers(1, 700), st.floats(-20, 20))
def test_no_vector_changes_by_more_than_is_promised(dim: int, exponent: float) -> None:
    vectors = some(2, dim, 2.0**exponent)
    if halved(vectors) is not None:
        assert change(vectors) <= LARGEST_CHANGE


@pytest.mark.parametrize(
    "row",
    [[0.0, 0.0], [1e-5, 1e-5], [6e-8, 0.0], [1e-40, 0.0], [65520.0, 0.0], [1e6, 0.0], [3e38, 3e38], [np.inf, 0.0]],
)
@pytest.mark.filterwarnings("error")
def test_a_row_that_float16_would_change_keeps_the_chunk_in_float32(row: list[float]) -> None:
    vectors = np.array([[0.6, 0.8], row, [np.nan, np.nan]], np.float32)
    assert halved(vectors) is None
    assert rounded(vectors) is vectors


@pytest.mark.filterwarnings("error")
def test_rows_of_nan_stay_so_and_decide_nothing() -> None:
    vectors = np.array([[np.nan, np.nan], [0.6, 0.8]], np.float32)
    halves = halved(vectors)
    assert halves is not None
    assert np.isnan(halves).tolist() == [[True, True], [False, False]]
    assert halved(np.full((2, 3), np.nan, np.float32)) is not None
    assert halved(np.empty((0, 4), np.float32)) is not None
