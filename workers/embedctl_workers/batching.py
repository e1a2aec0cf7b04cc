"""Batches of like lengths, so that little is padding."""

from __future__ import annotations

import numpy as np

from embedctl_workers.backends.base import Rows


def batches_of(lengths: Rows, token_budget: int) -> list[Rows]:
    """Cut rows into batches, longest first, each of rows × longest row ≤ `token_budget`.

    A row longer than the budget makes a batch of its own. Longest first: a batch that is too much for the device
    shows at once.

    Args:
        lengths: int64, tokens of each row.
    """
    order = np.argsort(-lengths, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        rows = max(1, token_budget // int(lengths[order[start]]))
        batches.append(order[start : start + rows])
        start += rows
    return batches
