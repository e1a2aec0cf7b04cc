"""Rows of different lengths in flat arrays."""

from __future__ import annotations

import numpy as np

from embedctl.waiting.shapes import MultiVectors, SparseVectors


def rows(*rows: list[int]) -> SparseVectors:
    flat = np.array([each for row in rows for each in row], np.uint32)
    return SparseVectors(99, np.array([len(row) for row in rows], np.int64), flat, (flat / 2).astype(np.float32))


def indices(found: SparseVectors) -> list[list[int]]:
    return [part.tolist() for part in np.split(found.indices, found.starts[1:-1])]


def test_rows_are_chosen_joined_and_replaced() -> None:
    some = rows([1, 2], [], [3], [4, 5, 6])
    assert indices(some.select(np.array([3, 1, 0]))) == [[4, 5, 6], [], [1, 2]]
    assert indices(some.select(slice(1, 3))) == [[], [3]]
    assert indices(SparseVectors.joined([some, rows([7])])) == [[1, 2], [], [3], [4, 5, 6], [7]]
    later = some.with_rows(np.array([1, 2]), rows([8, 9], []))
    assert indices(later) == [[1, 2], [8, 9], [], [4, 5, 6]]
    np.testing.assert_array_equal(later.weights, later.indices / 2)
    tokens = MultiVectors(2, np.array([2, 1]), np.arange(6, dtype=np.float32).reshape(3, 2))
    assert tokens.select(np.array([1])).vectors.tolist() == [[4, 5]]
