"""Parquet files that are written: every bit of the vectors for every reader, and columns of the types that they had."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedctl.corpus.column_types import written
from embedctl.corpus.reading import open_corpus
from embedctl.corpus.rows import Rows
from embedctl.destinations.loop import BeginAgain
from embedctl.destinations.parquet import KeptColumns, ParquetWriter
from embedctl.destinations.writer import Content
from tests.support.result_chunks import result_chunk, unit_vectors


def test_every_bit_comes_back_in_nine_tenths_of_the_size(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    vectors = unit_vectors(4096, 384)
    vectors[0, :4] = np.array([-0.0, 1e-45, np.inf, np.finfo(np.float32).max], np.float32)
    writer = ParquetWriter(Content(path, 4096))
    for first in range(0, 4096, 512):
        writer.write(result_chunk(vectors[first : first + 512], first=first))
    writer.finish()
    found = pq.read_table(path)["embedding"].combine_chunks().flatten().to_numpy()
    np.testing.assert_array_equal(found.view(np.uint32), vectors.reshape(-1).view(np.uint32))
    assert path.stat().st_size < 0.9 * vectors.nbytes


def test_other_readers_read_it(tmp_path: Path) -> None:
    import duckdb  # a process that keeps it until its end is told of leaks in it

    path = tmp_path / "v.parquet"
    vectors = unit_vectors(30, 8)
    writer = ParquetWriter(Content(path, 30))
    writer.write(result_chunk(vectors, failed=[3]))
    writer.finish()
    good = np.delete(vectors, 3, 0)
    frame = polars.read_parquet(path)
    assert frame["embedding"].null_count() == 1
    np.testing.assert_array_equal(frame["embedding"].drop_nulls().to_numpy(), good)
    rows = duckdb.execute(f"SELECT embedding FROM '{path}' WHERE error_code IS NULL ORDER BY position").fetchall()
    np.testing.assert_array_equal(np.array([row[0] for row in rows], np.float32), good)


def test_the_tokens_of_a_job_that_counts_them_have_a_column(tmp_path: Path) -> None:
    for name, tokens in (("counted", True), ("not", False)):
        writer = ParquetWriter(Content(tmp_path / name, 10, tokens=tokens))
        writer.write(result_chunk(unit_vectors(3, 4), failed=[1], tokens=[5, 0, 2**31]))
        writer.write(result_chunk(unit_vectors(2, 4), first=3))
        writer.finish()
    column = pq.read_table(tmp_path / "counted")["tokens"]
    assert (str(column.type), column.to_pylist()) == ("uint32", [5, None, 2**31, None, None])
    assert "tokens" not in pq.read_schema(tmp_path / "not").names


MOMENT = datetime(2026, 1, 2, 3, 4, 5, 600)
COLUMNS: list[tuple[Any, Any]] = [
    (pa.int8(), -5),
    (pa.uint64(), 2**64 - 1),
    (pa.float32(), 0.1),
    (pa.float16(), 0.5),
    (pa.bool_(), True),
    (pa.large_string(), "ü"),
    (pa.binary(), b"\1\xff"),
    (pa.binary(2), b"\1\xff"),
    (pa.decimal128(5, 2), Decimal("1.10")),
    (pa.decimal256(50, 3), Decimal("1.100")),
    (pa.date32(), date(2026, 1, 2)),
    (pa.time32("ms"), time(3, 4, 5, 6000)),
    (pa.time64("us"), time(3, 4, 5, 6)),
    (pa.time64("ns"), 3_000_000_001),
    (pa.timestamp("ms"), MOMENT.replace(microsecond=6000)),
    (pa.timestamp("us"), MOMENT),
    (pa.timestamp("us", "Europe/Berlin"), MOMENT.replace(tzinfo=UTC)),
    (pa.timestamp("ns"), 1_767_323_045_000_000_001),
    (pa.timestamp("ns", "+02:00"), -1),
    (pa.duration("ms"), timedelta(milliseconds=1500)),
    (pa.duration("us"), 2**63 - 1),
    (pa.duration("ns"), 1_234_567_891_234_567),
    (pa.list_(pa.dictionary(pa.int32(), pa.string())), ["a", "b"]),
    (pa.uuid(), bytes(15) + b"\5"),
    (pa.large_list(pa.int32()), [1]),
    (pa.list_(pa.float32(), 2), [1.5, 2.5]),
    (pa.struct([("d", pa.float64()), ("n", pa.list_(pa.string()))]), {"d": 1.5, "n": ["a", None]}),
]


@pytest.mark.parametrize(
    ("kind", "value"), COLUMNS, ids=lambda each: str(each) if isinstance(each, pa.DataType) else ""
)
def test_a_kept_column_comes_out_as_it_was(tmp_path: Path, kind: Any, value: Any) -> None:
    column = pa.array([value, None], kind)
    pq.write_table(pa.table({"text": ["a", "b"], "k": column}), tmp_path / "c.parquet")
    corpus = open_corpus(str(tmp_path / "c.parquet"), rows=Rows(100, keep=("k",)))
    rows = [json.loads(record.kept or b"") for record in corpus.records()]
    columns = KeptColumns(["k"], corpus.column_types())
    assert not columns.widened_by(rows)
    (found,) = columns.arrays(rows)
    assert found.type == pq.read_schema(tmp_path / "c.parquet").field("k").type == kind
    assert found.equals(column)


def test_what_is_nested_and_is_no_json_comes_out_as_text(tmp_path: Path) -> None:
    kinds = {"d": pa.list_(pa.date32()), "t": pa.struct([("at", pa.timestamp("us"))])}
    values = {"d": [[date(2026, 1, 2), None]], "t": [{"at": MOMENT}]}
    columns = {name: pa.array(values[name], kind) for name, kind in kinds.items()}
    pq.write_table(pa.table({"text": ["a"], **columns}), tmp_path / "c.parquet")
    corpus = open_corpus(str(tmp_path / "c.parquet"), rows=Rows(100, keep=("d", "t")))
    assert corpus.column_types() == {}
    (record,) = corpus.records()
    assert json.loads(record.kept or b"") == {"d": ["2026-01-02", None], "t": {"at": MOMENT.isoformat()}}


def test_a_time_beyond_pythons_years_costs_its_line_alone(tmp_path: Path) -> None:
    column = pa.array([0, -(10**17), None], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["a", "b", "c"], "k": column}), tmp_path / "c.parquet")
    bad: list[str] = []
    corpus = open_corpus(str(tmp_path / "c.parquet"), rows=Rows(100, keep=("k",)))
    assert [record.text for record in corpus.records(lambda error, _: bad.append(str(error)))] == [b"a", b"c"]
    assert "row 2: the field 'k' can't be kept: JSON has no form for a date beyond the years 1 to 9999" in bad[0]


def test_ids_come_out_with_the_type_of_their_column(tmp_path: Path) -> None:
    kind = pa.decimal128(3, 2)
    writer = ParquetWriter(Content(tmp_path / "v.parquet", 2, column_types={"id": written("id", kind)}))
    writer.write(result_chunk(unit_vectors(2, 4), ids=[Decimal("1.10"), None]))
    writer.finish()
    assert pq.read_table(tmp_path / "v.parquet")["id"].combine_chunks().equals(pa.array([Decimal("1.10"), None], kind))


def test_values_of_another_type_than_the_corpus_had_take_a_type_of_their_own(tmp_path: Path) -> None:
    types = {"k": written("k", pa.date32()), "gone": "no type"}
    writer = ParquetWriter(Content(tmp_path / "v.parquet", 2, ("k",), column_types=types))
    chunks = [result_chunk(unit_vectors(1, 4), kept=[{"k": value}]) for value in ("2026-01-02", "no date")]
    writer.write(chunks[0])
    with pytest.raises(BeginAgain):
        writer.write(chunks[1])
    for chunk in chunks:
        writer.write(chunk)
    writer.finish()
    assert pq.read_table(tmp_path / "v.parquet")["k"].to_pylist() == ["2026-01-02", "no date"]


def test_types_are_those_that_all_files_have(tmp_path: Path) -> None:
    for name, kind in (("a", pa.int32()), ("b", pa.int32()), ("c", pa.int64())):
        pq.write_table(pa.table({"text": ["a"], "k": pa.array([1], kind)}), tmp_path / f"{name}.parquet")
    (tmp_path / "d.jsonl").write_text('{"text": "a"}')
    rows = Rows(100, keep=("k",))

    def found(*names: str) -> dict[str, str]:
        return open_corpus(*(str(tmp_path / name) for name in names), rows=rows).column_types()

    assert found("a.parquet", "b.parquet") == {"k": written("k", pa.int32())}
    assert found("a.parquet", "c.parquet") == found("a.parquet", "d.jsonl") == {}


@pytest.mark.parametrize(
    ("values", "dtype", "column"),
    [
        ([], pa.string(), []),
        ([None, None], pa.string(), [None, None]),
        ([True, None], pa.bool_(), [True, None]),
        ([1, None, -(2**63)], pa.int64(), [1, None, -(2**63)]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([2**53, 2.5], pa.float64(), [2.0**53, 2.5]),
        ([2**53 + 1, 2.5], pa.string(), ["9007199254740993", "2.5"]),
        ([2**63], pa.string(), ["9223372036854775808"]),
        ([1, True], pa.string(), ["1", "true"]),
        (["a", 1, None, [1, "ü"], {"b": None}], pa.string(), ["a", "1", None, '[1,"ü"]', '{"b":null}']),
    ],
    ids=repr,
)
def test_a_column_has_the_narrowest_type_that_loses_nothing(values: list[Any], dtype: Any, column: list[Any]) -> None:
    columns = KeptColumns(["x"])
    rows = [{"x": value} for value in values]
    columns.widened_by(rows)
    assert columns.fields() == [("x", dtype)]
    (array,) = columns.arrays(rows)
    assert (array.type, array.to_pylist()) == (dtype, column)
