"""Chunks of results as row groups of a parquet file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embedctl.output.columns import KeptColumns
from embedctl.results import ChunkVectors

#: A row group ends with the chunk that fills one of these. Until the file is closed, each group costs some 13 kB of
#: memory; until a group is written, its rows are in memory.
ROWS, BYTES = 50_000, 64 * 1024 * 1024
#: The path of the vectors' numbers in the file's schema.
_NUMBERS = "embedding.list.element"
#: Texts that may repeat. A dictionary of anything else only makes the file larger and its writing slower.
_REPEATED = ("id", "error_code", "error_message")


class RowGroups:
    """Writes chunks to a parquet file, many to a row group, with a page index.

    The columns are `position`, `id`, `embedding` (a fixed-size list of float32; null if the record failed),
    `error_code`, `error_message`, `tokens_used` and `tokens_lost` (of truncated records), and one for each kept field.

    Args:
        path: the file; one that exists is overwritten.
        dim: dimensions of a vector.
        kept: the columns of the kept fields. Their types must hold the values of every chunk that is added.
    """

    def __init__(self, path: Path, dim: int, kept: KeptColumns) -> None:
        self._kept = kept
        fields = kept.fields()
        self._schema = pa.schema(
            [
                ("position", pa.int64()),
                ("id", pa.string()),
                ("embedding", pa.list_(pa.float32(), dim)),
                ("error_code", pa.string()),
                ("error_message", pa.string()),
                ("tokens_used", pa.int32()),
                ("tokens_lost", pa.int32()),
                *fields,
            ]
        )
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            use_dictionary=[*_REPEATED, *(name for name, dtype in fields if pa.types.is_string(dtype))],
            # The bytes of the same place of all numbers stand together: the signs and exponents then compress.
            column_encoding={_NUMBERS: "BYTE_STREAM_SPLIT"},
            write_page_index=True,
        )
        self._tables: list[Any] = []
        self._rows = self._bytes = 0

    def add(self, chunk: ChunkVectors) -> None:
        """Add a chunk. It is in the file once its row group is full, or the file is closed."""
        table = self._table(chunk)
        self._tables.append(table)
        self._rows += table.num_rows
        self._bytes += table.nbytes
        if self._rows >= ROWS or self._bytes >= BYTES:
            self._write()

    def close(self, metadata: Mapping[str, str] | None = None) -> None:
        """Write what is left, and the footer with these entries; it is not synced. A second call does nothing."""
        if self._writer.is_open:
            self._write()
            self._writer.add_key_value_metadata(metadata or {})
            self._writer.close()

    def _write(self) -> None:
        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables), row_group_size=self._rows)
        self._tables, self._rows, self._bytes = [], 0, 0

    def _table(self, chunk: ChunkVectors) -> Any:
        errors = {error.position: error for error in chunk.errors}
        cuts = {cut.position: cut for cut in chunk.truncations}
        at = chunk.positions.tolist()
        failed = np.array([position in errors for position in at], bool)
        numbers = pa.array(np.ascontiguousarray(chunk.vectors).reshape(-1))
        columns = [
            pa.array(at, pa.int64()),
            pa.array(chunk.ids, pa.string()),
            pa.FixedSizeListArray.from_arrays(numbers, chunk.vectors.shape[1], mask=pa.array(failed)),
            pa.array([errors[p].code.value if p in errors else None for p in at], pa.string()),
            pa.array([errors[p].message if p in errors else None for p in at], pa.string()),
            pa.array([cuts[p].used if p in cuts else None for p in at], pa.int32()),
            pa.array([cuts[p].lost if p in cuts else None for p in at], pa.int32()),
            *self._kept.arrays(chunk.kept or [{}] * len(at)),
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)
