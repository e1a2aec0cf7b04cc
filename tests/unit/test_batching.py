"""Batches: every row once, the longest first, within the budget."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from embedctl_workers.backends.base import Rows
from embedctl_workers.batching import batches_of

LENGTHS = st.lists(st.integers(1, 300), max_size=60).map(lambda lengths: np.array(lengths, np.int64))
BUDGETS = st.integers(1, 1000)


@given(LENGTHS, BUDGETS)
def test_every_row_is_in_one_batch(lengths: Rows, budget: int) -> None:
    rows = [row for batch in batches_of(lengths, budget) for row in batch.tolist()]
    assert sorted(rows) == list(range(len(lengths)))


@given(LENGTHS, BUDGETS)
def test_no_batch_is_over_the_budget_but_one_row_alone(lengths: Rows, budget: int) -> None:
    for batch in batches_of(lengths, budget):
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= budget


@given(LENGTHS, BUDGETS)
def test_the_longest_rows_come_first(lengths: Rows, budget: int) -> None:
    ordered = [length for batch in batches_of(lengths, budget) for length in lengths[batch].tolist()]
    assert ordered == sorted(ordered, reverse=True)


@given(LENGTHS, BUDGETS)
def test_no_batch_has_room_for_one_more_row(lengths: Rows, budget: int) -> None:
    batches = batches_of(lengths, budget)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * lengths[batch].max() > budget


@given(LENGTHS, BUDGETS)
def test_the_same_lengths_make_the_same_batches(lengths: Rows, budget: int) -> None:
    once, again = batches_of(lengths, budget), batches_of(lengths.copy(), budget)
    assert [batch.tolist() for batch in once] == [batch.tolist() for batch in again]


def test_rows_of_one_length_keep_their_order() -> None:
    assert [batch.tolist() for batch in batches_of(np.full(5, 4, np.int64), 8)] == [[0, 1], [2, 3], [4]]


def test_no_rows_make_no_batch() -> None:
    assert batches_of(np.zeros(0, np.int64), 10) == []
