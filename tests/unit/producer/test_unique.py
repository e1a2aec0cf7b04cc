"""Ids that occur twice, in memory and on the disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl.corpus import runs, unique
from embedctl.corpus.reading import open_corpus
from embedctl.corpus.rows import Rows
from embedctl.corpus.unique import UniqueIds
from embedctl_config.errors import InputError


def found(labels: Iterable[str]) -> tuple[int, list[tuple[int, int]]]:
    with UniqueIds() as ids:
        for place, label in enumerate(labels):
            ids.add(label, place)
        ids.find()
        return ids.count, ids.first


@pytest.mark.parametrize("held", [3, 2**10])
@given(st.lists(st.sampled_from("abcdefghij"), max_size=40))
def test_each_id_that_was_there_before_is_counted_and_some_are_named(held: int, labels: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unique, "_HELD", held)
        patch.setattr(runs, "_FILES", 8)  # each time all are opened
        count, first = found(labels)
    assert count == len(labels) - len(set(labels))
    assert len(first) == min(count, 10)
    assert all(before < again and labels[again] == labels[before] for again, before in first)


def test_no_room_for_temporary_files_says_where_to_make_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique, "_HELD", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(InputError, match=r"24 bytes for each in .*absent: No such file or directory. Make room"):
        found(["a", "b"])


def test_the_lines_of_a_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "x", "id": "a"}\n\n{"text": null, "id": "1"}\n')
    (tmp_path / "b.csv").write_text('text,id\n"two\nlines",b\nx,1\ny,a\n')
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.csv")]
    with pytest.raises(InputError) as raised:
        open_corpus(*paths, rows=Rows(10)).check_unique()
    lines = str(raised.value).replace(f"{tmp_path}/", "").splitlines()
    assert lines == [
        "2 ids are not unique, and ids must be. Rename them, or give --duplicates all",
        "b.csv, line 4: its id is that of a.jsonl, line 4",
        "b.csv, line 5: its id is that of a.jsonl, line 2",
    ]
    open_corpus(*paths, rows=Rows(10), limit=3).check_unique()
