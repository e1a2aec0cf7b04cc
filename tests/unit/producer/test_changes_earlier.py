"""Earlier outputs give back the vectors that were written, in whatever order they are wanted."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from embedctl.changes import earlier_parquet
from embedctl.changes.earlier import Earlier
from embedctl.changes.opening import open_earlier
from embedctl.destinations import parquet
from embedctl.destinations.about import About
from embedctl.destinations.npy import NpyWriter
from embedctl.destinations.numbers import Numbers, OutputType
from embedctl.destinations.parquet import ParquetWriter
from embedctl.destinations.writer import Content
from embedctl.digests import DIGEST_BYTES, as_rows
from embedctl.results import ChunkVectors, FailedRecord, TruncatedRecord
from embedctl_config.errors import OutputError, SettingsError
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.wire import ErrorCode

OPTIONS = {"prompt": None, "truncation": "truncate", "normalize": True}
ABOUT = About(job_fingerprint("ab" * 32, OPTIONS), "ab" * 32, "model", "fp32", OPTIONS)
RECORDS, DIM = 100, 3
#: float16 holds these exactly.
VECTORS = np.arange(RECORDS * DIM, dtype=np.float32).reshape(RECORDS, DIM)
FAILED, CUT, NO_TEXT = 13, 41, 77


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


def test_rows_are_told_in_their_order(path: Path) -> None:
    earlier = opened(path)
    assert (earlier.about, earlier.rows, earlier.dim) == (ABOUT, RECORDS, DIM)
    told = list(earlier.read())
    digests = np.concatenate([rows.digests for rows in told])
    np.testing.assert_array_equal(digests, chunk(0, RECORDS).digests)
    assert [label for rows in told for label in rows.ids] == [None if i % 10 == 0 else f"id-{i}" for i in range(100)]
    usable = np.concatenate([rows.usable for rows in told])
    assert np.flatnonzero(~usable).tolist() == [FAILED, NO_TEXT]


@pytest.mark.parametrize("order", ["forwards", "backwards", "mixed"])
@pytest.mark.parametrize("prepared", [True, False])
def test_vectors_come_in_the_order_that_is_wanted(
    order: str, prepared: bool, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [at for at in range(RECORDS) if at not in (FAILED, NO_TEXT)]
    rows = np.array(good[:: -1 if order == "backwards" else 1])
    if order == "mixed":
        rows = np.random.default_rng(3).permutation(rows)
    monkeypatch.setattr(earlier_parquet, "_SLICE", 16)
    earlier, every = opened(path), chunk(0, RECORDS).digests
    assert every is not None
    if prepared:
        earlier.prepare(np.insert(rows, 5, -1), tmp_path)
        assert (getattr(earlier, "_spool", None) is not None) is (order == "mixed" and path.suffix == ".parquet")
    for first in range(0, len(rows), 7):
        some = rows[first : first + 7]
        vectors, cuts, digests = earlier.take(some)
        np.testing.assert_array_equal(vectors, VECTORS[some])
        np.testing.assert_array_equal(digests, every[some])
        assert cuts == [(510, 9) if row == CUT else (0, 0) for row in some.tolist()]


def test_a_file_that_is_replaced_is_still_the_one_that_was_opened(path: Path) -> None:
    earlier = opened(path)
    other = path.with_name("other")
    other.write_bytes(b"something else")
    other.replace(path)
    vectors = earlier.take(np.array([5, 95])).vectors
    np.testing.assert_array_equal(vectors, VECTORS[[5, 95]])


@pytest.mark.parametrize("kind", list(OutputType))
def test_vectors_are_copied_only_as_they_are_stored(kind: OutputType, path: Path) -> None:
    ranges = np.stack([VECTORS.min(axis=0), VECTORS.max(axis=0)]) if kind is OutputType.INT8 else None
    numbers = Numbers(kind, ranges)
    written(path, numbers)
    for wanted in (None, Numbers(OutputType.FLOAT16)):
        if kind.value == ("float32" if wanted is None else "float16"):
            vectors = open_as(path, wanted).take(np.array([5, 6])).vectors
            np.testing.assert_array_equal(vectors, VECTORS[[5, 6]])
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


def test_a_file_of_another_output_next_to_an_array_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "old.npy", Numbers())
    (tmp_path / "old.truncated.jsonl").unlink()
    with pytest.raises(OutputError):
        opened(path)


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_an_output_without_rows(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"empty.{suffix}"
    make = ParquetWriter if suffix == "parquet" else NpyWriter
    make(Content(path, 0, about=lambda: ABOUT)).finish()
    earlier = opened(path)
    assert earlier.rows == 0
    assert [rows for rows in earlier.read() if rows.ids] == []


def test_an_array_that_is_replaced_by_one_without_digests_is_no_longer_vouched_for(tmp_path: Path) -> None:
    path = written(tmp_path / "old.npy", Numbers())
    writer = NpyWriter(Content(path, 10))
    writer.write(chunk(0, 10))
    writer.finish()
    assert not (tmp_path / "old.about.json").exists()
    assert not (tmp_path / "old.digests.bin").exists()
    with pytest.raises(OutputError, match="--digests"):
        opened(path)


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_an_output_that_is_not_there_is_none(suffix: str, tmp_path: Path) -> None:
    assert open_earlier(tmp_path / f"v.{suffix}", None) is None
    with pytest.raises(SettingsError, match="or the URL of a database"):
        open_earlier(tmp_path / "v.jsonl", None)


def test_an_array_whose_writer_died_while_it_replaced_it_counts_as_not_there(tmp_path: Path) -> None:
    """Its files have their names one after the other."""
    path = written(tmp_path / "v.npy", Numbers())
    (tmp_path / "v.about.json").unlink()
    with pytest.raises(OutputError, match="--digests"):
        opened(path)
    (tmp_path / ".v.npy.lock").touch()
    assert open_earlier(path, None) is None
