"""A job's results as users see them: vectors, failed records, truncated records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import Digests, taken_out
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.errors import SettingsError
from embedctl_config.outputs import Output
from embedctl_config.record_ids import RecordId
from embedctl_config.wire import ChunkResult, ErrorCode

#: float32, records × dimensions.
Vectors = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A record without a vector: its position in the input, its id if it has one, the reason and a sentence."""

    position: int
    id: RecordId | None
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class TruncatedRecord:
    """A record whose first tokens alone were encoded: the numbers of tokens used and lost."""

    position: int
    id: RecordId | None
    used: int
    lost: int


@dataclass(frozen=True, slots=True)
class ChunkVectors:
    """The results of one chunk: `vectors[i]` belongs to the record at `positions[i]`; a failed record's is NaN.

    Attributes:
        positions: int64, ascending.
        ids: each of the type that it had in the corpus, and None for a record without one.
        vectors: float32, records × dimensions; of 0 dimensions if the job asks for no dense vectors.
        precision: what the vectors promise, such as `fp32`.
        bounds: the bounds that the worker's class sets in place of the precision's, in words; empty if it sets none.
        kept: each record's kept fields, by name; None, or all empty, if the job keeps none.
        tokens: int64, how many tokens of each record were encoded, special ones included; 0 for a failed record. None
            if the job does not count them.
        digests: uint8, records × 32, the SHA-256 of each text in UTF-8; zeros for a record without a text. None if the
            job has no digests.
        sparse, multi: the sparse vectors and the multi-vectors, a row for each record; None if the job asks for none.
        stored_as: how a part of a drained job stores the vectors, such as `int8`. They are restored from that, and so
            only near those that were computed. Empty if they are those.
    """

    positions: npt.NDArray[np.int64]
    ids: list[RecordId | None]
    vectors: Vectors
    errors: list[FailedRecord]
    truncations: list[TruncatedRecord]
    precision: str = ""
    bounds: str = ""
    kept: list[Mapping[str, Any]] | None = None
    tokens: npt.NDArray[np.int64] | None = None
    stored_as: str = ""
    digests: Digests | None = None
    sparse: SparseVectors | None = None
    multi: MultiVectors | None = None

    def of(self, output: Output) -> Vectors | SparseVectors | MultiVectors | None:
        """The vectors of one kind."""
        return {Output.DENSE: self.vectors, Output.SPARSE: self.sparse, Output.MULTI: self.multi}[output]

    @property
    def nbytes(self) -> int:
        """Bytes of all vectors."""
        return self.vectors.nbytes + sum(each.nbytes for each in (self.sparse, self.multi) if each is not None)


class SparseRecord(NamedTuple):
    """A record's sparse vector: indices in the vocabulary, ascending (uint32), and their weights (float32)."""

    position: int
    id: RecordId | None
    indices: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.float32]


class MultiRecord(NamedTuple):
    """A record's multi-vector: float32, tokens × dimensions."""

    position: int
    id: RecordId | None
    vectors: npt.NDArray[np.float32]


def sparse_records(chunk: ChunkVectors) -> Iterator[SparseRecord]:
    """The records of a chunk that have a vector; SettingsError: its job has no sparse vectors."""
    rows = chunk.sparse
    if rows is None:
        return _refuse_lacking(chunk, Output.SPARSE)
    return (SparseRecord(position, label, *pairs) for position, label, pairs in _good(chunk, rows))


def multi_records(chunk: ChunkVectors) -> Iterator[MultiRecord]:
    """As :func:`sparse_records`, of multi-vectors."""
    rows = chunk.multi
    if rows is None:
        return _refuse_lacking(chunk, Output.MULTI)
    return (MultiRecord(position, label, vectors) for position, label, vectors in _good(chunk, rows))


def _refuse_lacking(chunk: ChunkVectors, output: Output) -> Iterator[Any]:
    if len(chunk.positions):  # of a stopped job, some chunks have no records
        raise SettingsError(f"the job has no {output} vectors: submit its corpus with --vectors {output} (vectors=)")
    return iter(())


def _good(chunk: ChunkVectors, rows: Iterable[T]) -> Iterator[tuple[int, RecordId | None, T]]:
    failed = {error.position for error in chunk.errors}
    found = zip(chunk.positions.tolist(), chunk.ids, rows, strict=True)
    return (each for each in found if each[0] not in failed)


def overlaid(chunk: ChunkVectors, later: ChunkVectors) -> ChunkVectors:
    """A chunk with some of its records replaced by those of a retry."""
    replaced = set(later.positions.tolist())
    rows = np.searchsorted(chunk.positions, later.positions)
    vectors, tokens = chunk.vectors.copy(), None
    vectors[rows] = later.vectors
    if chunk.tokens is not None and later.tokens is not None:
        tokens = chunk.tokens.copy()
        tokens[rows] = later.tokens
    return dataclasses.replace(
        chunk,
        vectors=vectors,
        sparse=None if chunk.sparse is None else chunk.sparse.with_rows(rows, later.sparse),
        multi=None if chunk.multi is None else chunk.multi.with_rows(rows, later.multi),
        tokens=tokens,
        errors=sorted(
            [*(each for each in chunk.errors if each.position not in replaced), *later.errors],
            key=lambda each: each.position,
        ),
        truncations=sorted([*chunk.truncations, *later.truncations], key=lambda each: each.position),
    )


def no_records(dim: int) -> ChunkVectors:
    """A chunk without records."""
    return ChunkVectors(np.arange(0), [], np.empty((0, dim), np.float32), [], [])


def chunk_vectors(result: ChunkResult) -> ChunkVectors:
    """The results of a chunk as decoded from the wire format."""
    positions = (
        np.arange(result.first, result.first + result.rows)
        if result.positions is None
        else np.asarray(result.positions, np.int64)
    )
    ids: list[RecordId | None] = [None] * result.rows if result.ids is None else list(result.ids)
    # Each cell was found to be an object as it was decoded, so all of them are one array, which is read much faster.
    kept = None if result.kept is None else json.loads(b"[%b]" % b",".join(result.kept))
    vectors = np.frombuffer(result.vectors, result.dtype).reshape(result.rows, result.dim).astype("<f4", copy=False)
    return ChunkVectors(
        positions=positions,
        ids=ids,
        vectors=vectors,
        errors=[
            FailedRecord(int(positions[each.row]), ids[each.row], each.code, each.message) for each in result.errors
        ],
        truncations=[
            TruncatedRecord(int(positions[each.row]), ids[each.row], each.used, each.lost)
            for each in result.truncations
        ],
        precision=result.precision,
        bounds=result.bounds,
        kept=kept,
        tokens=None if result.tokens is None else np.asarray(result.tokens, np.int64),
        digests=None if kept is None else taken_out(kept),
        sparse=None if result.sparse is None else SparseVectors.of(result.sparse),
        multi=None if result.multi is None else MultiVectors.of(result.multi),
    )
