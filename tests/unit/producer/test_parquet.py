"""The parquet files that are written: every bit of the vectors, for every reader, in large row groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars
import pyarrow.parquet as pq

from embedctl.destinations.parquet import ParquetWriter
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
