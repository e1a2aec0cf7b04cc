"""The columns of a parquet file, and chunks of results as its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embedctl.digests import NO_DIGEST
from embedctl.kept import TEXT_SHA256, TOKENS
from embedctl.output.columns import KeptColumns
from embedctl.output.numbers import FLOAT32, Numbers, OutputType, as_text
from embedctl.results import ChunkVectors, Vectors

#: The footer's entry about the numbers.
FACTS = "embedctl.vectors"
#: The path of the vectors' numbers in the file's schema.
_NUMBERS = "embedding.list.element"
#: Texts that may repeat. A dictionary of anything else only makes the file larger and its writing slower.
_REPEATED = ("id", "error_code", "error_message")


class Layout:
    """The columns of a parquet file, and how they are stored.

    The columns are `position`, `id`, `embedding` (a fixed-size list of numbers; null if the record failed),
    `error_code`, `error_message`, `tokens_used` and `tokens_lost` (of truncated records), `tokens` (if the job counts
    them; null if the record failed), `text_sha256` (32 bytes, if it has digests; null for a record without a text), and
    one for each kept field.

    Attributes:
        schema: of pyarrow.
        metadata: entries of the footer. Unless numbers are float32, `embedctl.vectors` is JSON with `output_type`,
            `dimensions` and, for int8, `ranges`.

    Args:
        dim: dimensions of a vector.
        kept: the columns of the kept fields. Their types must hold the values of every chunk that is added.
        numbers: how vectors are stored.
        tokens: whether there is a column of tokens.
        digests: whether there is a column of digests.
    """

    def __init__(
        self,
        dim: int,
        kept: KeptColumns,
        numbers: Numbers = FLOAT32,
        *,
        tokens: bool = False,
        digests: bool = False,
    ) -> None:
        self._dim = dim
        self._kept = kept
        self._numbers = numbers
        self._tokens = tokens
        self._digests = digests
        self._fields = kept.fields()
        facts = numbers.facts(dim)
        self.metadata = {FACTS: as_text(facts)} if facts else {}
        self.schema = pa.schema(
            [
                ("position", pa.int64()),
                ("id", pa.string()),
                ("embedding", pa.list_(pa.from_numpy_dtype(numbers.dtype), numbers.width(dim))),
                ("error_code", pa.string()),
                ("error_message", pa.string()),
                ("tokens_used", pa.int32()),
                ("tokens_lost", pa.int32()),
                *([(TOKENS, pa.uint32())] if tokens else []),
                *([(TEXT_SHA256, pa.binary(32))] if digests else []),
                *self._fields,
            ]
        )

    def facts(self) -> dict[str, Any]:
        """What another process has to know to make the same layout and go on, as JSON values."""
        columns = self.schema.to_string(show_field_metadata=False, show_schema_metadata=False)
        return {"dim": self._dim, "kept": self._kept.seen(), "columns": columns}

    def writer(self, where: Any) -> pq.ParquetWriter:
        """A writer for a path, or for a stream of pyarrow. It writes a page index."""
        repeated = [*_REPEATED, *(name for name, dtype in self._fields if pa.types.is_string(dtype))]
        # The bytes of the same place of all numbers stand together: the signs and exponents then compress. Of int8,
        # which parquet stores in four bytes, only a dictionary stores one.
        split = self._numbers.kind is not OutputType.INT8
        return pq.ParquetWriter(
            where,
            self.schema,
            compression="zstd",
            use_dictionary=repeated if split else [*repeated, _NUMBERS],
            column_encoding={_NUMBERS: "BYTE_STREAM_SPLIT"} if split else None,
            write_page_index=True,
            write_page_checksum=self._digests,  # its vectors will be copied
        )

    def table(self, chunk: ChunkVectors) -> Any:
        """A chunk as a table of these columns."""
        errors = {error.position: error for error in chunk.errors}
        cuts = {cut.position: cut for cut in chunk.truncations}
        at = chunk.positions.tolist()
        failed = np.array([position in errors for position in at], bool)
        numbers = self._numbers.of(chunk.vectors)
        columns = [
            pa.array(at, pa.int64()),
            pa.array(chunk.ids, pa.string()),
            pa.FixedSizeListArray.from_arrays(
                pa.array(np.ascontiguousarray(numbers).reshape(-1)), numbers.shape[1], mask=pa.array(failed)
            ),
            pa.array([errors[p].code.value if p in errors else None for p in at], pa.string()),
            pa.array([errors[p].message if p in errors else None for p in at], pa.string()),
            pa.array([cuts[p].used if p in cuts else None for p in at], pa.int32()),
            pa.array([cuts[p].lost if p in cuts else None for p in at], pa.int32()),
            *([_tokens(chunk, failed)] if self._tokens else []),
            *([_digests(chunk)] if self._digests else []),
            *self._kept.arrays(chunk.kept or [{}] * len(at)),
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)


def vectors_in(table: Any, numbers: Numbers, dim: int) -> Vectors:
    """The vectors of a table's rows, restored; a failed record's row is NaN, because its slot holds anything.

    Args:
        dim: dimensions of a vector.
    """
    embedding = table.column("embedding").combine_chunks()
    vectors = np.full((len(table), dim), np.nan, np.float32)
    valid = embedding.is_valid().to_numpy(zero_copy_only=False)
    stored = embedding.flatten().to_numpy(zero_copy_only=False).reshape(-1, embedding.type.list_size)
    vectors[valid] = numbers.restored(stored, dim)
    return vectors


def _tokens(chunk: ChunkVectors, failed: Any) -> Any:
    if chunk.tokens is None:
        return pa.nulls(len(failed), pa.uint32())
    return pa.array(chunk.tokens.astype(np.uint32), mask=failed)


def _digests(chunk: ChunkVectors) -> Any:
    if chunk.digests is None:
        return pa.nulls(len(chunk.positions), pa.binary(32))
    each = (row.tobytes() for row in chunk.digests)
    return pa.array([None if digest == NO_DIGEST else digest for digest in each], pa.binary(32))
