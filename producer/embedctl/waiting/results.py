"""A job's results as users see them: vectors, failed records, truncated records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import Digests, taken_out
from embedctl_config.record_ids import RecordId
from embedctl_config.wire import ChunkResult, ErrorCode

#: float32, records × dimensions.
Vectors = npt.NDArray[np.float32]


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
        vectors: float32, records × dimensions.
        precision: what the vectors promise, such as `fp32`.
        bounds: the bounds that the worker's class sets in place of the precision's, in words; empty if it sets none.
        kept: each record's kept fields, by name; None, or all empty, if the job keeps none.
        tokens: int64, how many tokens of each record were encoded, special ones included; 0 for a failed record. None
            if the job does not count them.
        digests: uint8, records × 32, the SHA-256 of each text in UTF-8; zeros for a record without a text. None if the
            job has no digests.
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
    )
