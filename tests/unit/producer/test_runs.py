"""Entries that are on the disk, where they are many."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from embedctl.corpus.runs import NAME, Entries, Runs, parts_of


def entries(first: int, count: int = 5) -> Entries:
    made = np.zeros(count, NAME)
    made["at"] = np.arange(first, first + count)
    made["d0"] = np.random.default_rng(first).integers(0, 2**64, count, np.uint64)
    return made


def spilled(held: int) -> Runs:
    runs = Runs(NAME, held, "a test takes room")
    for first in range(0, 1000, 5):
        runs.add(entries(first))
    return runs


@pytest.mark.parametrize("held", [4, 100, 10_000])
def test_all_entries_come_in_parts_in_the_order_of_their_digests(held: int) -> None:
    with spilled(held) as runs:
        assert runs.on_disk is (held < 1000)
        parts = [part for (part,) in parts_of(runs) if len(part)]
    assert sorted(np.concatenate(parts)["at"].tolist()) == list(range(1000))
    assert all(one["d0"].max() < other["d0"].min() for one, other in itertools.pairwise(parts))
