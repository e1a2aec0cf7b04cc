"""Cuts rows of any number and length into runs of the few shapes that a device was compiled for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedctl_workers.arrays.tokens import Rows


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a trace, `bucket` tokens long, for the rows `at` (int64) of the batch, at most a trace's."""

    bucket: int
    at: Rows


def runs_of(lengths: Rows, buckets: Sequence[int], batch: int) -> list[Run]:
    """Cut rows into as few runs as possible, longest first, each as short as its longest row allows.

    A run of `batch` rows costs the same however many of them are used. So shorter rows fill up a run of longer rows
    before they get another run. No row is longer than the last bucket; `buckets` ascend.
    """
    order = np.argsort(-lengths, kind="stable")
    parts = [order[start : start + batch] for start in range(0, len(order), batch)]
    return [Run(buckets[bisect_left(buckets, int(lengths[part[0]]))], part) for part in parts]


def positions_of(lengths: Rows, buckets: Sequence[int], batch: int) -> int:
    """The number of tokens that the device computes for rows of these lengths, padding and dummy rows included."""
    return sum(run.bucket * batch for run in runs_of(lengths, buckets, batch))
