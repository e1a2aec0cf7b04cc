"""What holds for LanceDB alone: its files are synced, and other programs that write there double nothing."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from embedctl.destinations import lancedb, writing
from embedctl.destinations.lancedb import LanceTable
from embedctl.destinations.registry import destination_of
from embedctl_config.errors import DestinationUnavailable, OutputError
from embedctl_config.settings import Settings
from tests.support.database_rows import written
from tests.support.databases import CONTRACT, DIM, Lance, assert_holds, batch
from tests.support.forked import status_of_fork


def write_to_a_full_disk(url: str, said: Path) -> None:
    """Write down what a table raises where no file can grow beyond a limit, which stands for a full disk."""
    destination = destination_of(url, Settings())
    destination.open(CONTRACT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        destination.write(batch([f"r{i}" for i in range(10_000)]))
    except DestinationUnavailable as error:
        said.write_text(str(error))


def test_a_full_disk_is_not_the_fault_of_records(tmp_path: Path) -> None:
    said = tmp_path / "said"
    assert status_of_fork(write_to_a_full_disk, f"lancedb://{tmp_path}?table=t", said) == 0
    assert "File too large" in said.read_text()
    assert ".rs:" not in said.read_text()


def test_a_disk_that_fills_between_the_rows_and_their_sync_doubles_none(
    in_lance: Lance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are in the table by then, and are written again as if they were not."""

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = [batch(["a", "b"]), batch(["c", "d"], seed=1)]
    with in_lance.delivery() as destination:
        destination.write(rows[0])
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            with pytest.raises(DestinationUnavailable, match="No space left"):
                destination.write(rows[1])
        assert destination.sources(["c"]), "it fails after the rows were added"
        destination.write(rows[1])
    assert_holds(in_lance, *rows)


def test_lance_syncs_all_that_a_version_consists_of(in_lance: Lance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it says that a batch is written: after a power cut, nothing else of it would be sure to be there."""
    synced: set[int] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    destination = in_lance.destination()
    destination.open(CONTRACT)

    def assert_durable() -> None:
        found = [*(in_lance.folder / f"{in_lance.table}.lance").rglob("*")]
        assert found
        assert not [path for path in found if path.stat().st_ino not in synced]

    assert_durable()
    destination.write(batch(["a", "b"]))
    assert_durable()
    destination.delete(batch(["a", "b"]).rows[:1])
    assert_durable()
    destination.close()
    assert_durable()


def test_a_table_of_lance_that_was_begun_is_made(in_lance: Lance) -> None:
    """Its maker died before it was there."""
    (in_lance.folder / f"{in_lance.table}.lance").mkdir(parents=True)
    written(in_lance, batch(["a"]))
    assert_holds(in_lance, batch(["a"]))


def test_two_processes_do_not_write_to_one_lance_table(in_lance: Lance) -> None:
    with in_lance.delivery(), pytest.raises(OutputError, match="another fetch is writing"):
        written(in_lance)
    written(in_lance)


def add_as_another_program(in_lance: Lance, label: str) -> None:
    """It does not ask for the lock."""
    import pyarrow as pa

    table = in_lance.opened()
    row = {"id": label, "embedding": [0.0] * DIM, "metadata": None, "source": None}
    table.add(pa.Table.from_pylist([row], schema=table.schema.remove_metadata()))


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("when", ["as it is opened", "before a batch", "within a batch"])
def test_another_programs_rows_are_not_doubled(
    in_lance: Lance, monkeypatch: pytest.MonkeyPatch, when: str, *, is_new: bool
) -> None:
    step = "_sync" if when == "as it is opened" else "_rows"
    rows, added, real = batch(["a", "b"]), [*"a"], getattr(LanceTable, step)
    there = [] if is_new else [batch(["there"])]
    written(in_lance, *there)

    def made(*given: Any) -> object:
        while added:
            add_as_another_program(in_lance, added.pop())
        return real(*given)

    monkeypatch.setattr(LanceTable, step, made)
    with in_lance.delivery() as destination:
        if when == "before a batch":
            add_as_another_program(in_lance, added.pop())
            assert destination.sources(["a"]) == {"a": None}
        destination.write(rows)
    assert_holds(in_lance, *there, rows)


def test_rows_with_new_ids_are_added_to_a_table_that_has_others(
    in_lance: Lance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge takes twice the time. All ids are read once, whatever this delivery adds and deletes."""
    written(in_lance, there := batch(["there"]))
    listed, real = list[tuple[str, ...]](), LanceTable._listed

    def list_counted(self: LanceTable, *columns: str) -> object:
        listed.append(columns)
        return real(self, *columns)

    with in_lance.delivery() as destination, monkeypatch.context() as patched:
        patched.setattr(LanceTable, "_merge", Mock(side_effect=AssertionError))
        patched.setattr(LanceTable, "_listed", list_counted)
        destination.write(batch(["a", "b"]))
        assert destination.delete(batch(["a", "b"]).rows) == 2
        destination.write(rows := batch(["c", "d"], seed=1))
        assert listed.count(("id",)) == 1
        patched.undo()
        destination.write(again := batch(["a"], seed=2))
    assert_holds(in_lance, there, rows, again)


@pytest.mark.usefixtures("no_pauses")
def test_a_program_that_compacts_a_lance_table_is_no_refusal(in_lance: Lance, monkeypatch: pytest.MonkeyPatch) -> None:
    written(in_lance, batch(["a"]))
    destination = in_lance.destination()
    destination.open(CONTRACT)

    def walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Find a file that is gone just then."""
        for each, folders, names in real(folder):
            yield each, folders, [*names, "compacted"]

    real = os.walk
    monkeypatch.setattr(os, "walk", walk)
    destination.write(batch(["b"]))
    optimize = Mock(side_effect=RuntimeError("lance error: Retryable commit conflict for version 3: This Rewrite …"))
    monkeypatch.setattr("lancedb.table.LanceTable.optimize", optimize)
    monkeypatch.setattr(lancedb, "_GATHERED", 1)
    writing.tried(destination.close)
    assert optimize.called
    assert sorted(in_lance.rows()) == ["a", "b"]


def test_small_pieces_of_a_lance_table_are_gathered_once_they_are_many(in_lance: Lance) -> None:
    def pieces() -> int:
        return int(in_lance.opened().stats()["fragment_stats"]["num_fragments"])

    written(in_lance, batch(["a"]))
    for night in range(lancedb._GATHERED - 1):
        written(in_lance, batch([f"{night}"]))
    assert pieces() == lancedb._GATHERED
    written(in_lance, batch(["last"]))
    assert pieces() == 1
    assert len(in_lance.rows()) == lancedb._GATHERED + 1
