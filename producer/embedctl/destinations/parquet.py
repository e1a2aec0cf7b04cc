"""`.parquet`: one row per record, in input order, in row groups of several chunks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl.corpus.column_types import parsed, restored
from embedctl.corpus.digests import NO_DIGEST
from embedctl.corpus.kept import TEXT_SHA256, TOKENS
from embedctl.destinations.interface import ABOUT
from embedctl.destinations.loop import BeginAgain
from embedctl.destinations.unfinished import part_of, publish
from embedctl.destinations.writer import Content, Writer
from embedctl.waiting.results import ChunkVectors, no_records
from embedctl_config.errors import MissingExtra
from embedctl_config.record_ids import TEXT, IdType, RecordId

try:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from embedctl.destinations.columns import arrow_type, column_of
    from embedctl.destinations.vector_columns import encodings, fields_of, vector_columns
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error

__all__ = ["FACTS", "KeptColumns", "ParquetWriter", "pa", "pq"]

#: A row group ends with the chunk that fills one of these; until then, its rows are in memory.
ROWS, BYTES = 50_000, 64 * 1024 * 1024
#: The footer's entry about the numbers.
FACTS = "embedctl.vectors"
#: Texts that may repeat. A dictionary of anything else only makes the file larger and its writing slower.
_REPEATED = ("id", "error_code", "error_message")
#: The whole numbers between this and its negative are exact as float64.
_EXACT = 2**53
_INT64 = 2**63


class ParquetWriter(Writer):
    """Writes row groups of several chunks. The columns of kept fields are `kept`, whose types only become wider, also
    from one file to the next; None for those of this file alone.

    The columns are `position`, `id`, `embedding` (a fixed-size list of numbers; null if the record failed), `sparse` (a
    list of `index` and `value`) and `multi` (a list of fixed-size lists), each if the job asks for these vectors,
    `error_code`, `error_message`, `tokens_used` and `tokens_lost` (of truncated records), `tokens` (if the job counts
    them; null if the record failed), `text_sha256` (32 bytes, if it has digests; null for a record without a text), and
    one for each kept field. Unless numbers are float32, the footer's entry `embedctl.vectors` is JSON with
    `dtype`, `dimensions` and, for int8, `ranges`.
    """

    def __init__(self, content: Content, kept: KeptColumns | None = None) -> None:
        self.paths = [content.path]
        self._content, self._kept = content, kept or KeptColumns(content.keep, content.column_types)
        self._tables: list[Any] = []
        self._rows = self._bytes = 0
        self._sink: Any = None
        self._ids: IdType | None = None  # until the first record with an id

    def write(self, chunk: ChunkVectors) -> None:
        """Add a chunk. It is in the file once its row group is full, or the file is closed. BeginAgain: a column of a
        kept field needs a wider type, and the file is gone."""
        if not len(chunk.positions):
            return  # the dimensions may not be known yet
        widened = self._kept.widened_by(chunk.kept or [{}] * len(chunk.positions))
        if self._ids is None and (label := next((each for each in chunk.ids if each is not None), None)) is not None:
            self._ids = IdType.of(label)
            widened |= self._ids != TEXT
        if widened and self._sink is not None:
            self.discard()
            raise BeginAgain
        if self._sink is None:
            self._begin(chunk)
        try:
            table = self._table(chunk)
        except OtherType as error:  # than that of the corpus
            self._kept.give_up(str(error))
            self.discard()
            raise BeginAgain from None
        self._tables.append(table)
        self._rows += table.num_rows
        self._bytes += table.nbytes
        if self._rows >= ROWS or self._bytes >= BYTES:
            self._flush()

    def finish(self) -> list[Path]:
        self.end()
        publish(self.paths[0])
        return self.paths

    def end(self, **entries: str) -> None:
        """Write what is left, and the footer, with these entries too; the file is not synced, and keeps its temporary
        name."""
        if self._sink is None:
            self._begin(no_records(0))
        if self._content.about is not None:
            entries[ABOUT] = self._content.about().text
        self._writer.add_key_value_metadata({**self._metadata, **entries})
        self.close()

    def close(self) -> None:
        """Write all chunks given, so that the file can be read as it is."""
        if self._sink is None or self._sink.closed:
            return
        try:
            self._flush()
            self._writer.close()
        finally:
            self._writer.is_open = False  # otherwise it tries to write once more when it is freed
            self._sink.close()

    def discard(self) -> None:
        super().discard()
        self._sink = None

    def _begin(self, chunk: ChunkVectors) -> None:
        of, fields = self._content, self._kept.fields()
        vectors = vector_columns(chunk, of.numbers, _failed(chunk))
        facts = of.numbers.facts(chunk.vectors.shape[1])
        self._metadata = {FACTS: json.dumps(facts, separators=(",", ":"))} if facts else {}
        self._schema = pa.schema(
            [
                ("position", pa.int64()),
                ("id", self._kept.id_type(self._ids or TEXT)),
                *fields_of(vectors, chunk),
                ("error_code", pa.string()),
                ("error_message", pa.string()),
                ("tokens_used", pa.int32()),
                ("tokens_lost", pa.int32()),
                *([(TOKENS, pa.uint32())] if of.tokens else []),
                *([(TEXT_SHA256, pa.binary(32))] if of.about is not None else []),
                *fields,
            ]
        )
        file = part_of(of.path)
        file.unlink(missing_ok=True)  # it might be a link to another file
        self._sink = pa.OSFile(os.fsencode(file), "wb")
        repeated = [*_REPEATED, *(name for name, dtype in fields if pa.types.is_string(dtype))]
        coarse, split = encodings(list(vectors), of.numbers)
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression="zstd",
            use_dictionary=[*repeated, *coarse],
            column_encoding=split or None,
            write_page_index=True,
            write_page_checksum=of.about is not None,  # its vectors will be copied
        )

    def _table(self, chunk: ChunkVectors) -> Any:
        errors = {error.position: error for error in chunk.errors}
        cuts = {cut.position: cut for cut in chunk.truncations}
        at = chunk.positions.tolist()
        failed = _failed(chunk)
        columns = [
            pa.array(at, pa.int64()),
            self._kept.ids(chunk.ids, self._ids or TEXT),
            *vector_columns(chunk, self._content.numbers, failed).values(),
            pa.array([errors[p].code.value if p in errors else None for p in at], pa.string()),
            pa.array([errors[p].message if p in errors else None for p in at], pa.string()),
            pa.array([cuts[p].used if p in cuts else None for p in at], pa.int32()),
            pa.array([cuts[p].lost if p in cuts else None for p in at], pa.int32()),
            *([_tokens(chunk, failed)] if self._content.tokens else []),
            *([_digests(chunk)] if self._content.about is not None else []),
            *self._kept.arrays(chunk.kept or [{}] * len(at)),
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _flush(self) -> None:
        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables), row_group_size=self._rows)
        self._tables, self._rows, self._bytes = [], 0, 0


def _failed(chunk: ChunkVectors) -> npt.NDArray[np.bool_]:
    failed: npt.NDArray[np.bool_] = np.isin(chunk.positions, [error.position for error in chunk.errors])
    return failed


def _tokens(chunk: ChunkVectors, failed: Any) -> Any:
    if chunk.tokens is None:
        return pa.nulls(len(failed), pa.uint32())
    return pa.array(chunk.tokens.astype(np.uint32), mask=failed)


def _digests(chunk: ChunkVectors) -> Any:
    if chunk.digests is None:
        return pa.nulls(len(chunk.positions), pa.binary(32))
    each = (row.tobytes() for row in chunk.digests)
    return pa.array([None if digest == NO_DIGEST else digest for digest in each], pa.binary(32))


class OtherType(Exception):
    """Raised, with the name of a column, when a value is not of the type that the column had in the corpus."""


class KeptColumns:
    """The columns of these kept fields. A column has the type that it had in a corpus in parquet. Any other one is of
    bool, int64, float64 or string, the narrowest that holds all values seen; in a string column, a text is itself, and
    any other value is its JSON."""

    def __init__(self, names: Sequence[str], of_corpus: Mapping[str, str] | None = None) -> None:
        self._seen: dict[str, set[str]] = {name: set() for name in names}
        self._of_corpus = parsed(of_corpus)
        self._types = self._types_of_all()

    def widened_by(self, rows: Iterable[Mapping[str, Any]]) -> bool:
        """Take note of these records' values; whether a column has another type now."""
        if not self._seen:
            return False
        before = self._types
        for row in rows:
            for name, seen in self._seen.items():
                seen.add(_kind(row.get(name)))
        self._types = self._types_of_all()
        return self._types != before

    def give_up(self, name: str) -> None:
        """Take a column's type from its values."""
        del self._of_corpus[name]

    def fields(self) -> list[tuple[str, pa.DataType]]:
        return list(self._types.items())

    def arrays(self, rows: Sequence[Mapping[str, Any]]) -> list[pa.Array]:
        return [self._array(name, [row.get(name) for row in rows]) for name in self._types]

    def id_type(self, of_ids: IdType) -> pa.DataType:
        return self._of_corpus.get("id", arrow_type(of_ids))

    def ids(self, ids: Sequence[RecordId | None], of_ids: IdType) -> pa.Array:
        with _of_column("id"):
            return column_of(ids, self.id_type(of_ids))

    def _array(self, name: str, values: Sequence[Any]) -> pa.Array:
        dtype = self._types[name]
        if name not in self._of_corpus:
            return pa.array([_value(value, dtype) for value in values], dtype)
        with _of_column(name):
            return restored(values, dtype)

    def _types_of_all(self) -> dict[str, pa.DataType]:
        return {name: self._of_corpus.get(name) or _type_of(seen - {"null"}) for name, seen in self._seen.items()}


@contextmanager
def _of_column(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise OtherType(name) from error


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "small" if -_EXACT <= value <= _EXACT else "int" if -_INT64 <= value < _INT64 else "huge"
    return "float" if isinstance(value, float) else "other"


def _type_of(kinds: set[str]) -> pa.DataType:
    if not kinds:
        return pa.string()
    if kinds == {"bool"}:
        return pa.bool_()
    if kinds <= {"small", "int"}:
        return pa.int64()
    # No number may lose a digit.
    return pa.float64() if kinds <= {"small", "float"} else pa.string()


def _value(value: object, dtype: pa.DataType) -> object:
    if value is None or isinstance(value, str) or not pa.types.is_string(dtype):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
