"""Reading the results of a drained job from its parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np

from embedctl.corpus.column_types import python_rows
from embedctl.corpus.digests import NO_DIGEST, as_rows
from embedctl.corpus.kept import TEXT_SHA256, TOKENS, as_plain
from embedctl.destinations.numbers import FLOAT32, Dtype, Numbers
from embedctl.destinations.place import place_of
from embedctl.destinations.released import refuse_database
from embedctl.store import Drains, DrainState
from embedctl.store.drains import BEYOND, first_part, part_name, part_names
from embedctl.waiting.results import ChunkVectors, FailedRecord, TruncatedRecord
from embedctl_config.errors import JobDrained, MissingExtra
from embedctl_config.wire import ErrorCode

try:
    from embedctl.destinations.parquet import pq
    from embedctl.destinations.part import footer_of, rows_of_chunks
    from embedctl.destinations.vector_columns import EMBEDDING, dense_in, multi_in, other_vectors, sparse_in
except ImportError as error:
    raise MissingExtra("parquet", "a drained job") from error

_OWN = ("position", "id", "error_code", "error_message", "tokens_used", "tokens_lost")


def numbers_of_parts(drains: Drains, job_id: str) -> Numbers:
    """How the parts of a job store its vectors; float32 if there is none. JobDrained: they can't be read here."""
    state = drains.state(job_id)
    return DrainedChunks(drains, job_id, state.place).numbers_of(name) if (name := first_part(state)) else FLOAT32


class DrainedChunks:
    """The drained chunks of one job. It holds one row group of one part. Every method raises JobDrained if a part can't
    be read here."""

    def __init__(self, drains: Drains, job_id: str, place: str) -> None:
        self._drains, self._job_id, self._where = drains, job_id, place
        refuse_database(drains, job_id, drains.state(job_id))
        if place.startswith(BEYOND):
            raise JobDrained(f"the vectors of job {job_id} were drained by a caller of a gateway: read the parts there")
        self._place = place_of(place)
        self._known = DrainState(0, 0, 0, place)
        self._lasts: list[int] = []  # the last chunk of each part of the corpus' chunks
        self._retried: dict[int, str] = {}  # chunk → the last part of retried records that holds it
        self._open: _OpenPart | None = None

    def chunk(self, index: int) -> ChunkVectors | None:
        """A drained chunk; None if its records are laid over those of another chunk."""
        name = self._name_of(index)
        if name is None:
            self._learn()
            name = self._name_of(index)
        if name is None:
            return None
        if self._open is None or self._open.name != name:
            self._open = None  # first free what it holds
            footer = self._footer(name)
            self._open = _OpenPart(name, self._place.source(name), footer)
        return self._open.chunk(index)

    def numbers_of(self, name: str) -> Numbers:
        return Numbers.of_facts(self._footer(name)["vectors"])

    def _name_of(self, index: int) -> str | None:
        if index in self._retried:
            return self._retried[index]
        number = bisect_right(self._lasts, index - 1)
        return part_name(number) if number < len(self._lasts) else None

    def _learn(self) -> None:
        state = self._drains.state(self._job_id)
        new = [name for name in part_names(state) if name not in set(part_names(self._known))]
        for name, facts in self._drains.parts(self._job_id, new):
            if facts.last < facts.first:
                self._retried |= {chunk: name for chunk, _, _ in rows_of_chunks(self._footer(name))}
            else:
                self._lasts.append(facts.last)
        self._known = state

    def _footer(self, name: str) -> Mapping[str, Any]:
        try:
            footer = footer_of(self._place.source(name))
        except OSError as error:
            raise self._unreachable(name, error.strerror or "it can't be read") from error
        if footer.get("job") != self._job_id:
            raise self._unreachable(name, "it is not the file that was written there")
        return footer

    def _unreachable(self, name: str, why: str) -> JobDrained:
        return JobDrained(
            f"the vectors of job {self._job_id} were drained to {self._where}, and {name} can't be read there from "
            f"here: {why}. Read the parts where they are, or bring them back"
        )


class _OpenPart:
    """A part, and one of its row groups. `source` is what pyarrow opens."""

    def __init__(self, name: str, source: Any, footer: Mapping[str, Any]) -> None:
        self.name, self._footer = name, footer
        self._numbers = Numbers.of_facts(footer["vectors"])
        self._file = pq.ParquetFile(source)
        self._rows = {chunk: (at, rows) for chunk, at, rows in rows_of_chunks(footer)}
        sizes = [self._file.metadata.row_group(at).num_rows for at in range(self._file.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self._group = -1
        self._table: Any = None

    def chunk(self, index: int) -> ChunkVectors | None:
        """One chunk; a chunk is in one row group. None if it is not in this part."""
        if index not in self._rows:
            return None
        at, rows = self._rows[index]
        group = int(np.searchsorted(self._starts, at, side="right")) - 1
        if group != self._group:
            self._table = None  # first free the last one
            self._table, self._group = self._file.read_row_group(group), group
        return _vectors_of(self._table.slice(at - int(self._starts[group]), rows), self._footer, self._numbers)


def _vectors_of(table: Any, footer: Mapping[str, Any], numbers: Numbers) -> ChunkVectors:
    tokens, digests = _column(table, TOKENS, "uint32"), _column(table, TEXT_SHA256, "fixed_size_binary[32]")
    told = [name for name, column in ((TOKENS, tokens), (TEXT_SHA256, digests)) if column is not None]
    vectors = [*([EMBEDDING] if EMBEDDING in table.column_names else []), *other_vectors(table.schema)]
    kept = table.drop_columns([*_OWN, *vectors, *told])
    positions, ids, codes, messages, used, lost = (table.column(name).to_pylist() for name in _OWN)
    return ChunkVectors(
        positions=np.asarray(positions, np.int64),
        ids=ids,
        vectors=dense_in(table, numbers, footer["vectors"].get("dimensions")),
        sparse=sparse_in(table),
        multi=multi_in(table),
        errors=[
            FailedRecord(positions[row], ids[row], ErrorCode(code), messages[row] or "")
            for row, code in enumerate(codes)
            if code is not None
        ],
        truncations=[
            TruncatedRecord(positions[row], ids[row], count, lost[row])
            for row, count in enumerate(used)
            if count is not None
        ],
        precision=str(footer.get("precision", "")),
        bounds=str(footer.get("bounds", "")),
        kept=_kept_of(kept) if kept.num_columns else None,
        tokens=None if tokens is None else tokens.fill_null(0).to_numpy().astype(np.int64),  # 0 without a vector
        digests=None if digests is None else as_rows(b"".join(each or NO_DIGEST for each in digests.to_pylist())),
        stored_as="" if numbers.kind is Dtype.FLOAT32 else numbers.kind.value,
    )


def _kept_of(columns: Any) -> list[Mapping[str, Any]]:
    return [as_plain(row) for batch in columns.to_batches() for row in python_rows(batch)]


def _column(table: Any, name: str, kind: str) -> Any:
    """A column that the job may tell; None if the part has none. No kept field has a column of this type."""
    is_there = name in table.column_names and str(table.schema.field(name).type) == kind
    return table.column(name) if is_there else None
