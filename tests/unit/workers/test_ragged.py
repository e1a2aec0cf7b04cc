"""Rows of different lengths in one array."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from embedctl_workers.arrays.tokens import Ragged

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
