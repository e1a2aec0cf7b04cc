"""Arrays: batches of every row within the budget, rows of different lengths in one array, vectors in float16."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl_workers.arrays.batching import batches_of
from embedctl_workers.arrays.halves import LARGEST_CHANGE, halved, rounded
from embedctl_workers.arrays.tokens import Ragged, Rows, Vectors
from embedctl_workers.arrays.vectors import unit

#: A text may have no token at all.
LENGTHS = st.lists(st.integers(0, 300), max_size=60).map(lambda lengths: np.array(lengths, np.int64))
BUDGETS = st.integers(1, 1000)
#: Of a batch; None: batches are as large as can be.
COSTS = st.none() | st.integers(0, 100)


@given(LENGTHS, BUDGETS, COSTS)
def test_every_row_is_in_one_batch_within_the_budget(lengths: Rows, budget: int, cost: int | None) -> None:
    batches = batches_of(lengths, budget, cost)
    rows = [row for batch in batches for row in batch.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    assert lengths[rows].tolist() == sorted(lengths.tolist(), reverse=True)
    assert all(len(batch) == 1 or len(batch) * lengths[batch].max() <= budget for batch in batches)
    assert rows == [row for batch in batches_of(lengths.copy(), budget, cost) for row in batch.tolist()]


@given(LENGTHS, BUDGETS)
def test_no_batch_has_room_for_one_more_row(lengths: Rows, budget: int) -> None:
    batches = batches_of(lengths, budget)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * max(1, lengths[batch].max()) > budget


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 100), st.integers(0, 100))
def test_no_other_batches_cost_less(lengths: list[int], budget: int, cost: int) -> None:
    ordered = sorted(lengths, reverse=True)

    def total(sizes: Sequence[int]) -> int:
        firsts = accumulate(sizes[:-1], initial=0)
        return sum(cost + size * ordered[first] for size, first in zip(sizes, firsts, strict=True))

    def allowed(sizes: Sequence[int]) -> bool:
        firsts = accumulate(sizes[:-1], initial=0)
        return all(size == 1 or size * ordered[first] <= budget for size, first in zip(sizes, firsts, strict=True))

    # Every way to cut them: a cut, or none, behind each row but the last.
    ways = []
    for cuts in product((False, True), repeat=len(ordered) - 1):
        edges = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), len(ordered)]
        ways.append([end - start for start, end in pairwise(edges)])
    found = [len(batch) for batch in batches_of(np.array(lengths, np.int64), budget, cost)]
    assert total(found) == min(total(sizes) for sizes in ways if allowed(sizes))


@given(LENGTHS, BUDGETS)
def test_rows_that_are_not_padded_fill_a_batch_by_their_sum(lengths: Rows, budget: int) -> None:
    batches = batches_of(lengths, budget, by_sum=True)
    assert np.concatenate([*batches, np.zeros(0, np.int64)]).tolist() == np.argsort(-lengths, kind="stable").tolist()
    counted = [np.maximum(1, lengths[batch]) for batch in batches]
    assert all(len(batch) == 1 or batch.sum() <= budget for batch in counted)
    assert all(batch.sum() + following[0] > budget for batch, following in pairwise(counted))


rows = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=8)


def listed(ragged: Ragged) -> list[list[int]]:
    return [ragged[row].tolist() for row in range(len(ragged))]


@given(rows)
def test_the_rows_are_those_given(given_rows: list[list[int]]) -> None:
    ragged = Ragged.of(given_rows)
    assert listed(ragged) == given_rows
    assert ragged.values.dtype == np.int32
    assert Ragged.of(given_rows, np.int64).values.dtype == np.int64


@given(st.data(), rows.filter(bool))
def test_rows_are_selected_in_any_order(data: st.DataObject, given_rows: list[list[int]]) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(given_rows) - 1), max_size=8))
    selected = Ragged.of(given_rows).select(np.array(chosen, np.int64))
    assert listed(selected) == [given_rows[row] for row in chosen]


@given(st.lists(rows, min_size=1, max_size=4))
def test_parts_are_joined(parts: list[list[list[int]]]) -> None:
    assert listed(Ragged.joined(Ragged.of(part) for part in parts)) == [row for part in parts for row in part]


def some(rows: int, dim: int, scale: float = 1.0) -> Vectors:
    vectors = np.random.default_rng(dim).standard_normal((rows, dim))
    scaled: Vectors = (scale * vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return scaled


def change(vectors: Vectors) -> float:
    """The largest change that rounding makes, as a part of a vector's length."""
    exact = vectors.astype(np.float64)
    return float((np.linalg.norm(rounded(vectors) - exact, axis=1) / np.linalg.norm(exact, axis=1)).max())


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
def test_a_vector_that_overflowed_is_seen() -> None:
    assert np.isfinite(unit(np.array([[np.inf, 1], [3, 4]], np.float32))).all(axis=1).tolist() == [False, True]
