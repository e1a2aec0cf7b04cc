"""Earlier outputs give back the vectors that were written, in whatever order they are wanted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from embedctl.corpus.digests import DIGEST_BYTES, Digests, as_rows
from embedctl.destinations import parquet
from embedctl.destinations.interface import Contract
from embedctl.destinations.npy import NpyWriter
from embedctl.destinations.numbers import Dtype, Numbers
from embedctl.destinations.parquet import ParquetWriter
from embedctl.destinations.writer import Content
from embedctl.sync import earlier_parquet, known
from embedctl.sync.earlier import open_earlier
from embedctl.sync.earlier_parquet import ParquetEarlier
from embedctl.sync.known import Earlier
from embedctl.waiting.results import ChunkVectors, FailedRecord, TruncatedRecord
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.errors import OutputError, SettingsError
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.wire import ErrorCode
from tests.support.jobs import assert_same_rows

OPTIONS = {"prompt": None, "long": "cut", "normalize": True}
ABOUT = Contract(job_fingerprint("ab" * 32, OPTIONS), "model", "fp32", OPTIONS, model_fingerprint="ab" * 32)
RECORDS, DIM = 100, 3
#: float16 holds these exactly.
VECTORS = np.arange(RECORDS * DIM, dtype=np.float32).reshape(RECORDS, DIM)
FAILED, CUT, NO_TEXT = 13, 41, 77
#: Of each record up to three weights and two tokens' vectors.
COUNTS = np.array([0 if i in (FAILED, NO_TEXT) else i % 4 for i in range(RECORDS)])
SPARSE = SparseVectors(
    7,
    COUNTS,
    np.concatenate([np.arange(i, dtype=np.uint32) for i in COUNTS]),
    np.arange(COUNTS.sum(), dtype=np.float32),
)
MULTI = MultiVectors(2, COUNTS, np.arange(2 * COUNTS.sum(), dtype=np.float32).reshape(-1, 2))


def chunk(first: int, count: int) -> ChunkVectors:
    at = range(first, first + count)
    each = [bytes(DIGEST_BYTES) if i == NO_TEXT else hashlib.sha256(b"%d" % i).digest() for i in at]
    vectors = VECTORS[first : first + count].copy()
    failed = {FAILED: ErrorCode.ENCODE_ERROR, NO_TEXT: ErrorCode.NOT_TEXT}
    errors = [FailedRecord(i, None, failed[i], "why") for i in at if i in failed]
    for error in errors:
        vectors[error.position - first] = np.nan
    return ChunkVectors(
        positions=np.arange(first, first + count),
        ids=[None if i % 10 == 0 else f"id-{i}" for i in at],
        vectors=vectors,
        errors=errors,
        truncations=[TruncatedRecord(i, None, 510, 9) for i in at if i == CUT],
        digests=as_rows(b"".join(each)),
        sparse=SPARSE.select(np.array(at)),
        multi=MULTI.select(np.array(at)),
    )


@pytest.fixture(params=["parquet", "npy"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output of ten row groups, or of one array."""
    monkeypatch.setattr(parquet, "ROWS", 10)
    return written(tmp_path / f"old.{request.param}", Numbers())


def written(path: Path, numbers: Numbers) -> Path:
    make = ParquetWriter if path.suffix == ".parquet" else NpyWriter
    writer = make(Content(path, RECORDS, numbers=numbers, about=lambda: ABOUT))
    for first in range(0, RECORDS, 10):
        writer.write(chunk(first, 10))
    writer.finish()
    return path


def opened(path: Path) -> Earlier:
    return open_as(path, None)


def open_as(path: Path, numbers: Numbers | None) -> Earlier:
    found = open_earlier(path, numbers)
    assert found is not None
    return found


def digests_of(*rows: int) -> Digests:
    every = chunk(0, RECORDS).digests
    assert every is not None
    return every[list(rows)]


@pytest.mark.parametrize("held", [8, 1000])
def test_texts_are_found_in_memory_and_on_the_disk(held: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_HELD", held)
    earlier = opened(path)
    assert (earlier.about, earlier.rows) == (ABOUT, RECORDS)
    assert np.flatnonzero(~earlier.has(digests_of(*range(RECORDS)))).tolist() == [FAILED, NO_TEXT]
    others = as_rows(b"".join(hashlib.sha256(b"other %d" % at).digest() for at in range(50)))
    assert not earlier.has(others).any()


@pytest.mark.parametrize("slice_bytes", [500, 16 * 1024 * 1024])
@pytest.mark.parametrize("order", ["forwards", "backwards", "mixed"])
def test_vectors_come_in_the_order_that_is_wanted(
    order: str, slice_bytes: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a row group is read in several slices."""
    monkeypatch.setattr(earlier_parquet, "_SLICE", slice_bytes)
    good = [at for at in range(RECORDS) if at not in (FAILED, NO_TEXT)]
    wanted = np.array(good[:: -1 if order == "backwards" else 1])
    if order == "mixed":
        wanted = np.random.default_rng(3).permutation(wanted)
    earlier = opened(path)
    if isinstance(earlier, ParquetEarlier):
        assert (max(earlier._slice_rows) < 10) is (slice_bytes == 500)
    for first in range(0, len(wanted), 7):
        some = wanted[first : first + 7].tolist()
        rows = earlier.take(digests_of(*some))
        np.testing.assert_array_equal(rows.vectors, VECTORS[some])
        np.testing.assert_array_equal(rows.digests, digests_of(*some))
        assert rows.cuts.tolist() == [[510, 9] if row == CUT else [0, 0] for row in some]
        if path.suffix == ".parquet":
            assert_same_rows(rows.sparse, SPARSE.select(np.array(some)))
            assert_same_rows(rows.multi, MULTI.select(np.array(some)))
    if path.suffix == ".parquet":
        brought = bool(getattr(earlier, "_all", None))
        assert brought is (order == "mixed"), "only a quite different order needs room on the disk"


@pytest.mark.parametrize("order", ["forwards", "mixed"])
def test_the_memory_for_reading_vectors_does_not_grow_with_a_row_group(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier_parquet, "_SLICE", 256 * 1024)
    monkeypatch.setattr(earlier_parquet, "_BUFFER", 64 * 1024)
    counts, width = np.full(RECORDS, 500), 128
    numbers = np.random.default_rng(1).standard_normal((counts.sum(), width), np.float32)
    multi = MultiVectors(width, counts, numbers)
    writer = ParquetWriter(Content(tmp_path / "v.parquet", RECORDS, about=lambda: ABOUT))
    writer.write(replace(chunk(0, RECORDS), errors=[], sparse=None, multi=multi))
    writer.finish()
    wanted = np.array([at for at in range(RECORDS) if at != NO_TEXT])
    if order == "mixed":
        wanted = np.random.default_rng(3).permutation(wanted)
    before, held = pa.total_allocated_bytes(), []
    earlier = opened(tmp_path / "v.parquet")
    for first in range(0, len(wanted), 7):
        some = wanted[first : first + 7].tolist()
        assert_same_rows(earlier.take(digests_of(*some)).multi, multi.select(np.array(some)))
        held.append(pa.total_allocated_bytes() - before)
    assert max(held) < numbers.nbytes / 8


def test_of_equal_texts_the_first_row_is_found(tmp_path: Path) -> None:
    same = chunk(0, 10)
    writer = NpyWriter(Content(tmp_path / "v.npy", 20, about=lambda: ABOUT))
    for first in (0, 10):
        writer.write(replace(same, positions=np.arange(first, first + 10), vectors=VECTORS[first : first + 10]))
    writer.finish()
    np.testing.assert_array_equal(opened(tmp_path / "v.npy").take(digests_of(3, 4)).vectors, VECTORS[3:5])


def test_a_file_that_is_replaced_is_still_the_one_that_was_opened(path: Path) -> None:
    earlier = opened(path)
    other = path.with_name("other")
    other.write_bytes(b"something else")
    other.replace(path)
    np.testing.assert_array_equal(earlier.take(digests_of(5, 95)).vectors, VECTORS[[5, 95]])


@pytest.mark.parametrize("kind", list(Dtype))
def test_vectors_are_copied_only_as_they_are_stored(kind: Dtype, path: Path) -> None:
    ranges = np.stack([VECTORS.min(axis=0), VECTORS.max(axis=0)]) if kind is Dtype.INT8 else None
    numbers = Numbers(kind, ranges)
    written(path, numbers)
    for wanted in (None, Numbers(Dtype.FLOAT16)):
        if kind.value == ("float32" if wanted is None else "float16"):
            np.testing.assert_array_equal(open_as(path, wanted).take(digests_of(5, 6)).vectors, VECTORS[[5, 6]])
        else:
            with pytest.raises(SettingsError, match=f"stores {kind.value}"):
                open_as(path, wanted)


@pytest.mark.parametrize("name", ["old.digests.bin", "old.ids.jsonl", "old.errors.jsonl", "old.npy", "old.about.json"])
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_an_array_and_the_files_next_to_it_must_belong_together(damage: str, name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "old.npy", Numbers())
    file = tmp_path / name
    if damage == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    if not path.exists():
        assert open_earlier(path, None) is None
        return
    with pytest.raises(OutputError):
        opened(path)


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_an_output_without_rows(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"empty.{suffix}"
    make = ParquetWriter if suffix == "parquet" else NpyWriter
    make(Content(path, 0, about=lambda: ABOUT)).finish()
    earlier = opened(path)
    assert earlier.rows == 0
    assert not earlier.has(digests_of(5)).any()


def test_an_array_that_is_replaced_by_one_without_digests_is_no_longer_vouched_for(tmp_path: Path) -> None:
    path = written(tmp_path / "old.npy", Numbers())
    writer = NpyWriter(Content(path, 10))
    writer.write(chunk(0, 10))
    writer.finish()
    assert not (tmp_path / "old.about.json").exists()
    assert not (tmp_path / "old.digests.bin").exists()
    with pytest.raises(OutputError, match="no digests"):
        opened(path)


def test_records_that_were_not_encoded_keep_their_rows_wherever_they_are(tmp_path: Path) -> None:
    path, there = tmp_path / "v.npy", [0, 1, 4, 9]
    whole = chunk(0, 10)
    part = replace(whole, positions=whole.positions[there], vectors=whole.vectors[there], digests=digests_of(*there))
    writer = NpyWriter(Content(path, 12, about=lambda: ABOUT))
    writer.write(replace(part, ids=[whole.ids[at] for at in there]))
    writer.finish()
    assert np.flatnonzero(~np.isnan(np.load(path)).any(axis=1)).tolist() == there
    ids = [json.loads(line) for line in (tmp_path / "v.ids.jsonl").read_text().splitlines()]
    assert ids == [whole.ids[at] if at in there else None for at in range(12)]
    assert np.flatnonzero(opened(path).has(digests_of(*range(10)))).tolist() == there


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_an_output_that_is_not_there_is_none(suffix: str, tmp_path: Path) -> None:
    assert open_earlier(tmp_path / f"v.{suffix}", None) is None
    with pytest.raises(SettingsError, match="or the URL of a database"):
        open_earlier(tmp_path / "v.jsonl", None)


def test_an_array_whose_writer_died_while_it_replaced_it_counts_as_not_there(tmp_path: Path) -> None:
    """Its files have their names one after the other."""
    path = written(tmp_path / "v.npy", Numbers())
    (tmp_path / "v.about.json").unlink()
    with pytest.raises(OutputError, match="no digests"):
        opened(path)
    (tmp_path / ".v.npy.lock").touch()
    assert open_earlier(path, None) is None
