"""Rows of any number and length as runs of the few shapes that a device was compiled for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedctl_workers.arrays.tokens import Rows


@dataclass(frozen=True, slots=True)
class Run:
    """What the device does at once.

    Attributes:
        bucket: its length, in tokens.
        at: int64, the places of its rows among those asked for; as many as a run has rows, or fewer.
    """

    bucket: int
    at: Rows


def runs_of(lengths: Rows, buckets: Sequence[int], batch: int) -> list[Run]:
    """As few runs as there can be, longest first, each as short as its longest row allows.

    A run costs the same however many of its rows are of use. So shorter rows fill up a run of longer ones before they
    get one of their own.

    Args:
        lengths: int64, tokens of each row, none longer than the last bucket.
        buckets: rising.
        batch: rows of a run.
    """
    order = np.argsort(-lengths, kind="stable")
    parts = [order[start : start + batch] for start in range(0, len(order), batch)]
    return [Run(buckets[bisect_left(buckets, int(lengths[part[0]]))], part) for part in parts]


def positions_of(lengths: Rows, buckets: Sequence[int], batch: int) -> int:
    """How many tokens the device computes for rows of these lengths, padding and dummy rows included."""
    return sum(run.bucket * batch for run in runs_of(lengths, buckets, batch))
