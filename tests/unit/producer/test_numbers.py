"""The types that vectors can be written in, and how they are restored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from embedctl.destinations.formats import check_output
from embedctl.destinations.npy import NpyWriter
from embedctl.destinations.numbers import Dtype, Numbers, agreed, load_ranges, ranges_of
from embedctl.destinations.parquet import ParquetWriter
from embedctl.destinations.writer import Content
from embedctl.waiting.results import no_records
from embedctl.waiting.shapes import MultiVectors
from embedctl_config.errors import OutputError, SettingsError
from tests.support.result_chunks import result_chunk, unit_vectors

VECTORS = unit_vectors(60, 20)
RANGES = np.stack([VECTORS.min(axis=0), VECTORS.max(axis=0)])
ALL = [Numbers(Dtype.FLOAT16), Numbers(Dtype.INT8, RANGES), Numbers(Dtype.BINARY)]


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [Numbers(Dtype.INT8, RANGES), Numbers(Dtype.BINARY)], ids=str)
def test_they_are_those_of_sentence_transformers(numbers: Numbers) -> None:
    from sentence_transformers.util.quantization import quantize_embeddings

    wider = np.concatenate([VECTORS, VECTORS * 3])  # values beyond the ranges too
    precision: Any = {Dtype.BINARY: "ubinary"}.get(numbers.kind, numbers.kind)
    expected = np.asarray(quantize_embeddings(wider, precision, ranges=numbers.ranges))
    np.testing.assert_array_equal(numbers.of(wider), expected)
    assert numbers.of(wider).dtype == expected.dtype


def test_int8_is_restored_to_half_a_step() -> None:
    numbers = Numbers(Dtype.INT8, RANGES)
    step = (RANGES[1] - RANGES[0]) / 255
    restored = RANGES[0] + (numbers.of(VECTORS).astype(np.float32) + 128.5) * step
    assert (np.abs(restored - VECTORS) <= step * 0.501).all()
    flat = np.ones((2, 3), np.float32)  # a component that has one value
    assert Numbers(Dtype.INT8, flat).of(flat).tolist() == [[-128] * 3] * 2


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_what_is_restored_gives_the_same_numbers_again(scale: float) -> None:
    vectors = VECTORS * np.float32(scale)
    vectors[:, 3] = 0.25  # a component that has one value
    ranges = np.stack([vectors.min(axis=0), vectors.max(axis=0)])
    int8 = Numbers(Dtype.INT8, ranges)
    for numbers in (Numbers(), Numbers(Dtype.FLOAT16), Numbers(Dtype.BINARY), int8):
        stored = numbers.of(vectors)
        restored = numbers.restored(stored, 20)
        assert restored.dtype == np.float32
        np.testing.assert_array_equal(numbers.of(restored), stored)
        again = Numbers.of_facts(json.loads(json.dumps(numbers.facts(20))))
        assert agreed(again, numbers, "j", restores=False) is numbers
    every = np.arange(-128, 128, dtype=np.int8)[:, None].repeat(20, axis=1)
    every[:, 3] = -128
    np.testing.assert_array_equal(int8.of(int8.restored(every, 20)), every)


@pytest.mark.parametrize("numbers", ALL, ids=lambda each: each.kind)
def test_an_array_tells_which_rows_are_no_vectors(numbers: Numbers, tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    writer = NpyWriter(Content(path, 60, numbers=numbers))
    writer.write(result_chunk(VECTORS[:20], failed=[3]))
    writer.write(no_records(20))
    writer.write(result_chunk(VECTORS[40:], first=40))
    written = writer.finish()
    found = np.load(path)
    assert found.dtype == numbers.dtype
    there = [*range(3), *range(4, 20), *range(40, 60)]
    np.testing.assert_array_equal(found[there], numbers.of(VECTORS)[there])
    ids = [json.loads(line) for line in (tmp_path / "v.ids.jsonl").read_text().splitlines()]
    assert ids == [f"id-{at}" if not 20 <= at < 40 else None for at in range(60)]
    errors = [json.loads(line) for line in (tmp_path / "v.errors.jsonl").read_text().splitlines()]
    if numbers.has_nan:
        assert np.flatnonzero(np.isnan(found).any(axis=1)).tolist() == [3, *range(20, 40)]
        assert [error["position"] for error in errors] == [3]
    else:
        assert [(error["position"], error["code"]) for error in errors] == [
            (3, "empty"),
            *((at, "stopped") for at in range(20, 40)),
        ]
    beside = tmp_path / "v.ranges.npy"
    assert beside.exists() == (beside in written) == (numbers.ranges is not None)
    if numbers.ranges is not None:
        np.testing.assert_array_equal(load_ranges(beside), RANGES)


@pytest.mark.parametrize("numbers", ALL, ids=lambda each: each.kind)
def test_a_parquet_file_says_how_to_restore_them(numbers: Numbers, tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    writer = ParquetWriter(Content(path, 60, numbers=numbers))
    writer.write(result_chunk(VECTORS, failed=[3]))
    writer.finish()
    table = pq.read_table(path)
    assert table["embedding"].null_count == 1
    good = np.array(table["embedding"].drop_null().to_pylist(), numbers.dtype)
    np.testing.assert_array_equal(good, np.delete(numbers.of(VECTORS), 3, 0))
    facts = json.loads(pq.read_metadata(path).metadata[b"embedctl.vectors"])
    assert (facts["dtype"], facts["dimensions"]) == (numbers.kind, 20)
    if numbers.ranges is not None:
        np.testing.assert_array_equal(np.array(facts["ranges"], np.float32), RANGES)


def test_ranges_are_those_of_the_first_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl.destinations.numbers.CALIBRATED_ON", 20)
    chunks = [result_chunk(VECTORS[at : at + 10], first=at, failed=[0]) for at in range(0, 60, 10)]
    first = np.delete(VECTORS[:20], [0, 10], 0)
    ranges, seen = ranges_of(iter(chunks), "job x")
    np.testing.assert_array_equal(ranges, np.stack([first.min(axis=0), first.max(axis=0)]))
    assert seen == len(first)
    with pytest.raises(OutputError, match=r"job x: int8 needs .* and 1 record has a vector: give .* --ranges"):
        ranges_of([result_chunk(VECTORS[:2], failed=[0])], "job x")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="ranges are of vectors with 20 dimensions, and these have 8"):
        Numbers(Dtype.INT8, RANGES).of(unit_vectors(2, 8))
    with pytest.raises(SettingsError, match=r"takes float32 alone: name the output \.npy or \.parquet for int8"):
        check_output(tmp_path / "v.jsonl", numbers=Numbers(Dtype.INT8, RANGES))


def test_what_overflows_float16_is_an_error_of_its_record_alone() -> None:
    vectors = unit_vectors(4, 2)
    vectors[1, 0], vectors[3, 1] = 65_519, -65_520
    multi = MultiVectors(1, np.array([0, 2, 2, 1]), np.array([[1], [2], [65_519], [65_520], [5]], np.float32))
    chunk = replace(result_chunk(vectors, first=10, failed=[0]), multi=multi)
    found, refused = Numbers(Dtype.FLOAT16).fitting(chunk)
    assert [(each.position, each.code, each.message) for each in refused] == [
        (12, "non_finite", "the vector overflows float16"),
        (13, "non_finite", "the vector overflows float16"),
    ]
    assert found.errors == [*chunk.errors, *refused]
    assert np.isfinite(Numbers(Dtype.FLOAT16).of(found.vectors)).all(axis=1).tolist() == [False, True, False, False]
    assert found.multi is not None
    assert (found.multi.counts.tolist(), found.multi.vectors.tolist()) == ([0, 2, 0, 0], [[1], [2]])
    assert np.isfinite(vectors).all(), "the chunk itself stays as it is"
    assert Numbers(Dtype.FLOAT32).fitting(chunk) == (chunk, [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"text", "is no .npy file"),
        (np.zeros((3, 4), np.float32), "two rows"),
        (np.zeros((2, 4), np.int64), "two rows"),
        (np.array([[1.0], [0.0]]), "not above"),
        (np.array([[0.0], [np.nan]]), "finite"),
        (None, "is no .npy file"),
    ],
)
def test_a_file_that_holds_no_ranges_is_named(content: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, np.asarray(content))
    with pytest.raises(SettingsError, match=said):
        load_ranges(path)
