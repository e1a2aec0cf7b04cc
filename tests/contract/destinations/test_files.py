"""Files of every format: whatever happens, the next fetch makes the one that it would have been."""

from __future__ import annotations

import itertools
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow.parquet as pq
import pytest
import scipy.sparse

from embedctl import Job, OutputError, enqueue_embeddings
from embedctl.destinations import parquet
from embedctl.destinations.files import fetch
from embedctl.destinations.loop import Callbacks
from embedctl.destinations.unfinished import check_folder
from embedctl.destinations.writer import Writer
from embedctl.queueing.broker import Broker
from embedctl_config.errors import UnusableOutput
from embedctl_config.outputs import Output
from embedctl_config.settings import Settings
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.failpoints import Killed, dies_at, full_disk
from tests.support.jobs import reference
from tests.support.rig import Rig, encoded_job

#: The arrays of a sparse matrix.
CSR = ("data", "indices", "indptr", "shape", "format")
#: A kept field becomes wider in the middle of the file.
ITEMS = [{"id": f"r{i}", "text": f"text {i}" if i != 7 else "", "n": i if i < 50 else i + 0.5} for i in range(100)]


@pytest.fixture(params=["npy", "npz", "jsonl", "parquet"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group of three chunks."""
    monkeypatch.setattr(parquet, "ROWS", 20)


@pytest.fixture
def vectors(request: pytest.FixtureRequest) -> list[str] | None:
    """What a file of this kind can hold."""
    is_sparse = "kind" in request.fixturenames and request.getfixturevalue("kind") == "npz"
    return ["dense", "sparse"] if is_sparse else None


@pytest.fixture
def job(broker: Broker, settings: Settings, vectors: list[str] | None) -> Job:
    return encoded_job(broker, settings, ITEMS, keep=("n",), count_tokens=True, vectors=vectors)


def found(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_fetch_that_is_interrupted_leaves_nothing(kind: str, job: Job, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fetch(job, tmp_path / f"v.{kind}", Callbacks(written=dies_at(72)))
    assert found(tmp_path) == {}


def test_a_full_disk_changes_no_file(kind: str, job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"v.{kind}").write_text("before")
    with full_disk(4000 if kind != "npz" else 2000), pytest.raises(OutputError, match=r"written: .*File too large"):
        fetch(job, tmp_path / f"v.{kind}")
    assert found(tmp_path) == {f"v.{kind}": b"before"}
    assert capfd.readouterr().err == "", "no footer is written once more as the writer is freed"
    fetch(job, tmp_path / f"v.{kind}")


def test_a_link_is_followed_and_a_pipe_is_refused(kind: str, job: Job, tmp_path: Path) -> None:
    """A finished file would take their place: who reads the pipe would wait for ever."""
    target, link, pipe = (tmp_path / name / f"v.{kind}" for name in ("elsewhere", "link", "pipe"))
    for each in (target, link, pipe):
        each.parent.mkdir()
    link.symlink_to(target)
    os.mkfifo(pipe)
    job.deliver(link)
    assert link.is_symlink()
    assert target.is_file()
    assert list(link.parent.iterdir()) == [link]
    (loop := tmp_path / f"loop.{kind}").symlink_to(loop)
    job.deliver(loop)
    assert loop.is_file()
    with pytest.raises(UnusableOutput, match="it is no file"):
        job.deliver(pipe)
    assert list(pipe.parent.iterdir()) == [pipe]


def test_a_folder_of_another_user_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = f"permission denied in {tmp_path}, which belongs to user {tmp_path.stat().st_uid}: run as that user, or "
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UnusableOutput, match=re.escape(f"{theirs}chown 12345 {tmp_path}")):
        check_folder(tmp_path, "v.npy")


def test_leftovers_are_in_no_file(
    kind: str, job: Job, broker: Broker, settings: Settings, tmp_path: Path, vectors: list[str] | None
) -> None:
    other = encoded_job(broker, settings, [f"other {i}" for i in range(30)], vectors=vectors)
    (tmp_path / "whole").mkdir()
    fetch(job, tmp_path / "whole" / f"v.{kind}")
    (tmp_path / "mixed").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Writer, "discard", lambda self: None)  # nobody tidies after a kill
        with pytest.raises(Killed):
            fetch(other, tmp_path / "mixed" / f"v.{kind}", Callbacks(written=dies_at(16)))
    fetch(job, tmp_path / "mixed" / f"v.{kind}")
    assert found(tmp_path / "mixed") == found(tmp_path / "whole")


def test_records_must_add_up_to_a_file(kind: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Job.iter_results

    def lossy(self: Job, **options: Any) -> Any:
        return (chunk for chunk in real(self, **options) if chunk.positions[0] != 80)

    monkeypatch.setattr(Job, "iter_results", lossy)
    with pytest.raises(OutputError, match=r"the job has 100 records, and 91 written .* 1 failed .* makes 92"):
        fetch(job, tmp_path / f"v.{kind}")
    assert found(tmp_path) == {}


def test_a_column_that_becomes_wider_is_written_again_from_the_first_record(job: Job, tmp_path: Path) -> None:
    fetch(job, tmp_path / "v.parquet")
    file = pq.ParquetFile(tmp_path / "v.parquet")
    rows = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
    assert rows == [24, 24, 24, 24, 4]
    assert file.metadata.row_group(3).column(0).statistics.min == 72
    assert file.metadata.row_group(3).column(0).has_offset_index
    assert set(file.metadata.metadata) == {b"ARROW:schema"}
    frame = polars.read_parquet(tmp_path / "v.parquet")
    assert frame["n"].to_list() == [item["n"] for item in ITEMS]
    expected = reference([str(item["text"]) or "x" for item in ITEMS])
    np.testing.assert_array_equal(frame["embedding"].drop_nulls().to_numpy(), np.delete(expected, 7, 0))


def test_the_next_fetch_fills_the_holes(
    kind: str, broker: Broker, settings: Settings, tmp_path: Path, vectors: list[str] | None
) -> None:
    """The first fetch died, then the stopped job was resumed, and then the second fetch came."""
    texts = [f"text {i}" for i in range(100)]
    again = partial(enqueue_embeddings, texts, settings=settings, chunk_size=8, idempotency_key="k", vectors=vectors)
    job = again()
    rig = Rig(broker, settings, DummyBackend(dim=16))
    for chunk in (0, 1, 2, 3, 6, 7, 8, 9, 10):
        rig.run(job, chunk)
    job.stop()

    with pytest.raises(Killed):
        fetch(job, tmp_path / f"v.{kind}", Callbacks(written=dies_at(80)))
    again()
    for chunk in (4, 5, 11, 12):
        rig.run(job, chunk)
    fetch(job, tmp_path / f"v.{kind}")
    if kind == "npz":
        check_sparse(job, tmp_path / "v.npz", 100)
        found = np.load(tmp_path / "v.npz")["dense"]
    elif kind == "npy":
        found = np.load(tmp_path / "v.npy")
    else:
        read = polars.read_ndjson if kind == "jsonl" else polars.read_parquet
        found = np.array(read(tmp_path / f"v.{kind}")["embedding"].to_list(), np.float32)
    np.testing.assert_array_equal(found, reference(texts))


def check_sparse(job: Job, path: Path, records: int) -> None:
    """The matrix in a file has the rows of a job."""
    matrix = scipy.sparse.load_npz(path)
    assert (matrix.format, matrix.dtype, matrix.has_canonical_format) == ("csr", np.float32, True)
    assert matrix.shape == (records, DummyBackend(dim=16).widths[Output.SPARSE])
    rows = {record.position: record for record in job.sparse()}
    assert rows
    for position in range(records):
        row, record = matrix[[position]], rows.get(position)
        np.testing.assert_array_equal(row.indices, [] if record is None else record.indices)
        np.testing.assert_array_equal(row.data, [] if record is None else record.weights)


@pytest.mark.parametrize("asked", ["dense", "sparse", "dense,sparse"])
def test_the_rows_of_a_npz_are_the_records_of_a_stopped_job(
    asked: str, broker: Broker, settings: Settings, tmp_path: Path
) -> None:
    texts = [f"text {i}{' fail-encoder' * (i in (3, 9))}" for i in range(60)]
    job = enqueue_embeddings(texts, settings=settings, chunk_size=8, vectors=asked)
    rig = Rig(broker, settings, DummyBackend(dim=16, poison=True))
    for chunk in (1, 2, 4):
        rig.run(job, chunk)
    job.stop()
    done = job.deliver(tmp_path / "v.npz")
    assert [str(path).rpartition("/")[2] for path in done.files] == ["v.npz", "v.npz.errors.jsonl"]
    names = set(np.load(tmp_path / "v.npz"))
    assert names == {*(["dense"] if "dense" in asked else []), *(CSR if "sparse" in asked else [])}
    if "dense" in names:
        there = [at for at in range(60) if at // 8 in (1, 2, 4) and at != 9]
        dense = np.load(tmp_path / "v.npz")["dense"]
        np.testing.assert_array_equal(dense[there], reference([texts[at] for at in there]))
        assert np.flatnonzero(~np.isnan(dense).any(axis=1)).tolist() == there
    if "sparse" in asked:
        check_sparse(job, tmp_path / "v.npz", 60)
    errors = [json.loads(line) for line in (tmp_path / "v.npz.errors.jsonl").read_text().splitlines()]
    assert [error["position"] for error in errors if error["code"] != "stopped"] == [9]
    assert len(errors) == 60 - 23, "an empty row may be a vector without weights: each that is none is named"
    assert {path.name for path in tmp_path.iterdir()} == {"v.npz", "v.npz.errors.jsonl"}


@pytest.mark.parametrize("at", [0, 6, 12])
def test_records_that_are_retried_meanwhile_are_each_a_vector_or_an_error(
    at: int, broker: Broker, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They move to another chunk while their own is read, and are encoded there."""
    job = enqueue_embeddings(
        [f"text {i}{' fail-encoder' * (i % 7 == 3)}" for i in range(100)], settings=settings, chunk_size=8
    )
    Rig(broker, settings, DummyBackend(dim=16, poison=True)).run_all(job, range(13))
    reader, reads = Job.get(job.id, settings), itertools.count()
    result = reader._broker.jobs.result

    def overtaken(job_id: str, chunk: int) -> bytes | None:
        if next(reads) == at:
            assert job.retry_failed() == 14
            Rig(broker, settings, DummyBackend(dim=16)).run_all(job, range(13, job.status().chunks))
        return result(job_id, chunk)

    monkeypatch.setattr(reader._broker.jobs, "result", overtaken)
    fetch(reader, tmp_path / "v.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [line["position"] for line in lines] == list(range(100))
    assert all(("embedding" in line) != ("error" in line) for line in lines)
    errors = [line["position"] for line in lines if "error" in line]
    assert all(position % 7 == 3 for position in errors)
    assert bool(errors) == (at > 0), "of what is read later, the retried records come"
    assert len(errors) < 14 or at == 12
