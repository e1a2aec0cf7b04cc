"""Entries that are on the disk, where they are many."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from embedctl.runs import NAME, Entries, Runs, parts_of
from embedctl_config.errors import InputError


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


def test_what_was_on_the_disk_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with spilled(4) as runs:
        assert runs.on_disk
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    with pytest.raises(InputError, match="TMPDIR"):
        spilled(4)
