"""Which records of two sets have equal texts."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl.changes import join
from embedctl.changes.join import ENTRY, entries, places_in
from embedctl.digests import Digests, as_rows
from embedctl.runs import Entries, Runs, parts_of
from embedctl_config.errors import InputError

#: Records: a text, and an id or none.
Rows = list[tuple[str, str | None]]
ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, "1", "2"])), max_size=12)


def digests(rows: Rows) -> Digests:
    return as_rows(b"".join(hashlib.sha256(text.encode()).digest() for text, _ in rows))


def made(rows: Rows, first: int = 0) -> Entries:
    return entries(digests(rows), [label for _, label in rows], first)


def expected_places(old: Rows, new: Rows) -> list[int]:
    """One record after the other."""
    found = []
    for at, row in enumerate(new):
        same = [place for place, each in enumerate(old) if each == row]
        texts = [place for place, each in enumerate(old) if each[0] == row[0]]
        rank = new[:at].count(row)
        found.append(same[min(rank, len(same) - 1)] if same else texts[0] if texts else -1)
    return found


def spilled(dtype: np.dtype[np.void], parts: Sequence[Entries]) -> Runs:
    held = join.spilled(dtype)
    for part in parts:
        held.add(part)
    return held


@given(ROWS, ROWS)
def test_a_record_has_the_vector_of_its_text_and_if_it_can_of_its_id(old: Rows, new: Rows) -> None:
    assert places_in(made(old), made(new)).tolist() == expected_places(old, new)


@pytest.mark.parametrize("many", [(True, True), (True, False), (False, True)])
def test_many_records_are_compared_on_the_disk_as_in_memory(
    many: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    old: Rows = [(f"text {at % 900}", f"{at}") for at in range(1000)]
    new: Rows = [(f"text {at % 950}", f"{at}") for at in reversed(range(1100))]
    found = np.full(len(new), -2)
    sides = []
    for rows, on_disk in zip((old, new), many, strict=True):
        monkeypatch.setattr(join, "_HELD", 64 if on_disk else 10_000)
        sides.append(spilled(ENTRY, [made(rows[first : first + 50], first) for first in range(0, len(rows), 50)]))
        assert sides[-1].on_disk is on_disk
    with sides[0] as there, sides[1] as wanted:
        for some, others in parts_of(there, wanted):
            found[others["at"].astype(np.int64)] = places_in(some, others)
    assert found.tolist() == expected_places(old, new)


def test_what_was_on_the_disk_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(join, "_HELD", 4)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with spilled(ENTRY, [made([(f"{at}", None) for at in range(20)])]) as held:
        assert held.on_disk
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_HELD", 4)
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    with pytest.raises(InputError, match="TMPDIR"):
        spilled(ENTRY, [made([(f"{at}", None) for at in range(20)])])
