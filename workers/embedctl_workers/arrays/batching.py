"""Cuts rows into batches of similar lengths, so that little of a batch is padding."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from embedctl_workers.arrays.tokens import Rows, padded


def batches_of(lengths: Rows, token_budget: int, batch_cost: int | None = None, *, by_sum: bool = False) -> list[Rows]:
    """Cut rows of these lengths (int64, tokens) into batches, longest first, of a size (:func:`size_of`) ≤
    `token_budget`.

    A row longer than the budget gets a batch of its own. Longest first, so that a batch which is too large for the
    device fails at once. `batch_cost` is what a batch costs beside its rows × longest row, in tokens; the total cost is
    then minimised. None, as with `by_sum`: each batch is as large as the budget allows. Rows are int64.
    """
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order]
    if batch_cost is None:
        starts = _full(longest_first, token_budget, by_sum=by_sum)
    else:
        starts = _cheapest(longest_first, token_budget, batch_cost)
    return [order[start:end] for start, end in pairwise([*starts, len(order)])]


def size_of(lengths: Rows, *, by_sum: bool) -> int:
    """What a batch counts against the token budget: the sum of its rows if `by_sum`, else rows × longest row."""
    return int(lengths.sum()) if by_sum else padded(lengths)


def _full(lengths: Rows, token_budget: int, *, by_sum: bool) -> list[int]:
    """Where batches start if each is as large as possible."""
    starts = []
    start = 0
    ends = np.cumsum(np.maximum(1, lengths))
    while start < len(lengths):
        starts.append(start)
        if by_sum:
            before = ends[start - 1] if start else 0
            start = max(start + 1, int(np.searchsorted(ends, before + token_budget, side="right")))
        else:
            start += _most_rows(lengths, start, token_budget)
    return starts


def _cheapest(lengths: Rows, token_budget: int, batch_cost: int) -> list[int]:
    """Where the batches with the lowest total cost start, found as a shortest path over the rows."""
    rows = len(lengths)
    # For the rows before each position: their lowest cost, and where the last of their batches starts.
    cost = np.full(rows + 1, np.iinfo(np.int64).max)
    cost[0] = 0
    last = np.zeros(rows + 1, np.int64)
    for start in range(rows):
        most = min(_most_rows(lengths, start, token_budget), rows - start)
        ends = slice(start + 1, start + 1 + most)
        with_this = cost[start] + batch_cost + lengths[start] * np.arange(1, most + 1)
        better = with_this < cost[ends]
        cost[ends][better] = with_this[better]
        last[ends][better] = start
    starts: list[int] = []
    end = rows
    while end:
        end = int(last[end])
        starts.append(end)
    return starts[::-1]


def _most_rows(lengths: Rows, start: int, token_budget: int) -> int:
    # A text has no token if a tokenizer without special tokens drops all its characters.
    return max(1, token_budget // max(1, int(lengths[start])))
