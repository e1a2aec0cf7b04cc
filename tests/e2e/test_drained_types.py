"""Parts that store vectors in smaller numbers: one type and the same ranges for a job, whoever drains it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow.parquet as pq
import pytest

from embedctl import Job, OutputError, SettingsError, enqueue_embeddings
from embedctl.destinations.files import fetch
from embedctl.destinations.loop import Callbacks
from embedctl.destinations.numbers import Dtype, Numbers
from embedctl.destinations.place import Place
from embedctl.store import Drains
from embedctl.store.connection import Connection
from embedctl.waiting.results import ChunkVectors, Vectors
from embedctl_config.settings import Settings
from tests.support.drained_parts import manifest_of, rows_of, write_corpus
from tests.support.failpoints import killed_at
from tests.support.jobs import reference
from tests.support.limits import limited
from tests.support.processes import RunEmbedctl
from tests.support.rig import Encode, Rig
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.workers import StartWorker

TEXTS = [f"text {i}" if i != 7 else "" for i in range(100)]
GOOD = [i for i in range(100) if i != 7]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return limited(settings.replace(lease_s=30.0), part_records=20)


@pytest.fixture
def job(encode: Encode) -> Job:
    return encode(TEXTS)


def expected() -> Vectors:
    return reference([text or "x" for text in TEXTS])[GOOD]


def ranges_of_all(vectors: Vectors) -> Vectors:
    return np.stack([vectors.min(axis=0), vectors.max(axis=0)])


def facts_of(folder: Path) -> list[dict[str, Any]]:
    """What each part says of its numbers."""
    return [json.loads(pq.read_metadata(part).metadata[b"embedctl.vectors"]) for part in sorted(folder.glob("part-*"))]


def numbers_in(folder: Path) -> Any:
    """The numbers of all good records in parts, alone from the files."""
    rows = rows_of(folder)
    assert sorted(rows) == list(range(100))
    assert rows[7]["embedding"] is None
    return np.array([rows[at]["embedding"] for at in GOOD])


@pytest.mark.parametrize("kind", Dtype)
def test_parts_and_what_is_fetched_hold_the_same_numbers(kind: Dtype, encode: Encode, tmp_path: Path) -> None:
    job = encode(TEXTS, count_tokens=True)
    numbers = Numbers(kind, ranges_of_all(expected()) if kind is Dtype.INT8 else None)
    for name in ("a.npy", "a.parquet"):
        fetch(job, tmp_path / name, numbers=Numbers(kind))
    fetch(job, tmp_path / "a.jsonl")
    job.deliver(tmp_path / "out", dtype=kind)
    np.testing.assert_array_equal(numbers_in(tmp_path / "out"), numbers.of(expected()))
    assert manifest_of(tmp_path / "out")["dtype"] == kind
    if kind is not Dtype.FLOAT32:
        assert facts_of(tmp_path / "out") == [numbers.facts(16)] * 5
    for name in ("b.npy", "b.parquet"):
        fetch(job, tmp_path / name)
        assert (tmp_path / name).read_bytes() == (tmp_path / f"a{name[1:]}").read_bytes()
    if kind is Dtype.INT8:
        np.testing.assert_array_equal(np.load(tmp_path / "b.ranges.npy"), numbers.ranges)
    (restored,) = {chunk.stored_as for chunk in job.iter_results()}
    assert restored == ("" if kind is Dtype.FLOAT32 else kind)
    np.testing.assert_array_equal(job.vectors()[GOOD], numbers.restored(numbers.of(expected()), 16))
    assert np.isnan(job.vectors()[7]).all()
    counts = polars.read_parquet(tmp_path / "b.parquet")["tokens"].to_list()
    assert counts == [None if at == 7 else 2 for at in range(100)]
    found = np.concatenate([chunk.tokens for chunk in job.iter_results() if chunk.tokens is not None])
    assert found.tolist() == [0 if count is None else count for count in counts]


@pytest.mark.parametrize("kind", [Dtype.FLOAT16, Dtype.INT8, Dtype.BINARY])
def test_another_type_than_that_of_the_parts_is_refused(kind: Dtype, job: Job, tmp_path: Path) -> None:
    job.deliver(tmp_path / "out", dtype=kind)
    other = Dtype.BINARY if kind is not Dtype.BINARY else Dtype.FLOAT16
    with pytest.raises(SettingsError, match=f"was drained as {kind}: omit the dtype {other}"):
        fetch(job, tmp_path / "v.npy", numbers=Numbers(other))
    with pytest.raises(SettingsError, match=f"were drained as {kind}, and .*v.jsonl takes float32 alone: name") as told:
        fetch(job, tmp_path / "v.jsonl")
    assert ("have them restored with" in str(told.value)) == (kind is not Dtype.BINARY)
    if kind is Dtype.BINARY:
        with pytest.raises(SettingsError, match="float32 can't be restored from that"):
            fetch(job, tmp_path / "v.npy", numbers=Numbers())
    else:
        fetch(job, tmp_path / "v.jsonl", numbers=Numbers())
        found = polars.read_ndjson(tmp_path / "v.jsonl")["embedding"].drop_nulls().to_list()
        np.testing.assert_array_equal(np.array(found, np.float32), job.vectors()[GOOD])
        assert np.abs(np.array(found) - expected()).max() < 0.01
    if kind is Dtype.INT8:
        fetch(job, tmp_path / "v.npy", numbers=Numbers(kind, job.stored_numbers().ranges))
        with pytest.raises(SettingsError, match="was drained with other ranges: omit the ranges"):
            fetch(job, tmp_path / "v.npy", numbers=Numbers(kind, ranges_of_all(expected()) * 2))
    assert not list(tmp_path.glob(".*"))


def test_a_drain_that_goes_on_keeps_the_type_and_the_ranges(job: Job, rig: Rig, tmp_path: Path) -> None:
    """The first drainer dies when its first part is noted. Its successors know no more than the folder."""
    ranges = ranges_of_all(expected()) * np.float32(0.9)
    with killed_at(Drains, "note", 2, after=True):
        job.deliver(tmp_path, dtype="int8", ranges=ranges)
    for other in ("float32", "float16"):
        with pytest.raises(SettingsError, match=f"{job.id} was drained as int8: omit the dtype {other}$"):
            job.deliver(tmp_path, dtype=other)
    with pytest.raises(SettingsError, match="was drained with other ranges: omit the ranges"):
        job.deliver(tmp_path, dtype="int8", ranges=ranges * 2)
    job.deliver(tmp_path)
    assert job.retry_failed() == 1
    rig.run(job, 13)
    job.deliver(tmp_path, dtype="int8")
    assert len(facts_of(tmp_path)) == 6
    assert facts_of(tmp_path) == [Numbers(Dtype.INT8, ranges).facts(16)] * 6
    np.testing.assert_array_equal(numbers_in(tmp_path), Numbers(Dtype.INT8, ranges).of(expected()))
    assert job.retry_failed() == 1


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [(Drains, "note", False), (Place, "publish", False), (Place, "publish", True)],
)
def test_a_type_counts_from_the_first_noted_part(job: Job, tmp_path: Path, owner: Any, name: str, after: bool) -> None:
    with killed_at(owner, name, 1, after=after):
        job.deliver(tmp_path, dtype="int8")
    job.deliver(tmp_path, dtype="float16")
    np.testing.assert_array_equal(numbers_in(tmp_path), expected().astype(np.float16))
    assert {facts["dtype"] for facts in facts_of(tmp_path)} == {"float16"}


def test_a_fetch_that_meets_new_parts_of_another_type_ends(job: Job, tmp_path: Path) -> None:
    copy = Job(job.id, job._broker)

    def drained(chunk: ChunkVectors) -> None:
        if chunk.positions[0] == 40:
            copy.deliver(tmp_path / "out", dtype="int8")

    with pytest.raises(OutputError, match="was drained as int8 since this fetch began: fetch it once more"):
        fetch(job, tmp_path / "v.npy", Callbacks(written=drained))
    fetch(job, tmp_path / "v.npy")
    assert np.load(tmp_path / "v.npy").dtype == np.int8


# ------------------------------------------------------------------------------------- ranges of a job that is running


@pytest.mark.parametrize("why", ["high water", "full"])
def test_ranges_are_those_of_all_records_that_redis_holds_at_once(
    why: str,
    rig: Rig,
    settings: Settings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before there are 100,000 records, the job is held back, or Redis is full of others'."""
    texts = [f"text {i}" for i in range(400)]
    held = limited(settings, results_high_water_bytes=15_000 if why == "high water" else 10**9)
    if why == "full":
        monkeypatch.setattr(Connection, "is_full", lambda self: True)
    job = enqueue_embeddings(texts, settings=settings, chunk_size=8)
    rig.run_all(job, range(25))
    drainer = threading.Thread(target=lambda: Job.get(job.id, held).deliver(tmp_path, dtype="int8"))
    drainer.start()
    eventually(lambda: bool(rows_of(tmp_path)) if tmp_path.exists() else False)
    eventually(lambda: bool(rig.run()) and job.status().state.ended)  # it is held back until more is drained
    drainer.join(PATIENCE_S)
    ranges = ranges_of_all(reference(texts[:200]))
    assert {json.dumps(each["ranges"]) for each in facts_of(tmp_path)} == {json.dumps(ranges.tolist())}
    assert "the ranges of int8 are those of 200 records, because Redis holds no more" in caplog.text
    found = np.array([row["embedding"] for _, row in sorted(rows_of(tmp_path).items())], np.int8)
    np.testing.assert_array_equal(found, Numbers(Dtype.INT8, ranges).of(reference(texts)))


def test_too_few_records_for_ranges_are_refused(rig: Rig, settings: Settings, tmp_path: Path) -> None:
    job = enqueue_embeddings([f"text {i}" for i in range(400)], settings=settings, chunk_size=8)
    rig.run_all(job, range(10))
    held = Job.get(job.id, limited(settings, results_high_water_bytes=2_000))
    with pytest.raises(OutputError, match=r"holds only 80 records .*: give a file with --ranges, or raise"):
        held.deliver(tmp_path, dtype="int8")
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- the commands


def test_a_run_into_a_folder_in_int8(embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path) -> None:
    texts = write_corpus(short_folder, 600)
    start_worker()
    ranges = ranges_of_all(reference(texts[:200]))
    np.save(short_folder / "ranges.npy", ranges)
    small = {"LIMIT_PART_RECORDS": "100", "LIMIT_RESULTS_HIGH_WATER_BYTES": "20000"}
    wanted = ["-o", "out/", "--dtype", "int8", "--ranges", "ranges.npy"]
    done = embedctl("submit", "c.jsonl", *wanted, "--chunk-size", "50", **small, status=0)
    job = done.stdout.strip()
    numbers = Numbers(Dtype.INT8, ranges)
    embedctl("fetch", job, "-o", "v.npy", status=0)
    np.testing.assert_array_equal(np.load(short_folder / "v.npy"), numbers.of(reference(texts)))
    refused = embedctl("fetch", job, "-o", "out/", "--dtype", "float32", **small)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"job {job} was drained as int8: omit the dtype float32" in refused.stderr
