"""`.parquet`: one row per record, in input order; one row group per chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedctl.output.columns import KeptColumns
from embedctl.output.parts import BeginAgain, part_of, publish
from embedctl.results import ChunkVectors
from embedctl_config.errors import MissingExtra

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error


class ParquetWriter:
    """Writes the columns `position`, `id`, `embedding` (a fixed-size list of float32; null if the record failed),
    `error_code`, `error_message`, `tokens_used` and `tokens_lost` (of truncated records), and one for each kept field.
    """

    needs_total = False

    def __init__(self, path: Path, records: int, noted: Mapping[str, int] | None, keep: Sequence[str] = ()) -> None:
        self._path = path
        self._writer: Any = None
        self._kept = KeptColumns(keep)

    def write(self, chunk: ChunkVectors) -> None:
        kept = chunk.kept or [{}] * len(chunk.positions)
        if self._kept.widened_by(kept) and self._writer is not None:
            self.close()
            self._writer = None
            raise BeginAgain
        if self._writer is None:
            self._open(chunk.vectors.shape[1])
        errors = {error.position: error for error in chunk.errors}
        cuts = {cut.position: cut for cut in chunk.truncations}
        at = chunk.positions.tolist()
        failed = np.array([position in errors for position in at], bool)
        flat = pa.array(np.ascontiguousarray(chunk.vectors).reshape(-1))
        columns = [
            pa.array(at, pa.int64()),
            pa.array(chunk.ids, pa.string()),
            pa.FixedSizeListArray.from_arrays(flat, chunk.vectors.shape[1], mask=pa.array(failed)),
            pa.array([errors[p].code.value if p in errors else None for p in at], pa.string()),
            pa.array([errors[p].message if p in errors else None for p in at], pa.string()),
            pa.array([cuts[p].used if p in cuts else None for p in at], pa.int32()),
            pa.array([cuts[p].lost if p in cuts else None for p in at], pa.int32()),
            *self._kept.arrays(kept),
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._writer.schema))

    def checkpoint(self) -> None:
        """None: a parquet file is unusable without its footer, so after a fetch died, the next one begins again."""

    def finish(self) -> list[Path]:
        if self._writer is None:
            self._open(0)
        self.close()
        publish(self._path)
        return [self._path]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def discard(self) -> None:
        part_of(self._path).unlink(missing_ok=True)

    def _open(self, dim: int) -> None:
        schema = pa.schema(
            [
                ("position", pa.int64()),
                ("id", pa.string()),
                ("embedding", pa.list_(pa.float32(), dim)),
                ("error_code", pa.string()),
                ("error_message", pa.string()),
                ("tokens_used", pa.int32()),
                ("tokens_lost", pa.int32()),
                *self._kept.fields(),
            ]
        )
        part_of(self._path).unlink(missing_ok=True)  # it might be a link to another file
        self._writer = pq.ParquetWriter(part_of(self._path), schema, compression="zstd")
