"""Chunks of results, made without a worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from embedctl.waiting.results import ChunkVectors, FailedRecord, TruncatedRecord, Vectors
from embedctl_config.record_ids import RecordId
from embedctl_config.wire import ErrorCode


def unit_vectors(rows: int, dim: int, seed: int = 0) -> Vectors:
    """Random vectors of length 1: float32, rows × dim."""
    vectors = np.random.default_rng(seed).standard_normal((rows, dim), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def result_chunk(
    vectors: Vectors,
    *,
    first: int = 0,
    ids: Sequence[RecordId | None] | None = None,
    failed: Collection[int] = (),
    truncated: Collection[int] = (),
    kept: list[Mapping[str, Any]] | None = None,
    tokens: Sequence[int] | None = None,
) -> ChunkVectors:
    """A chunk with these vectors, of which the rows in `failed` are errors, and those in `truncated` lost 7 tokens."""
    names: list[RecordId | None] = (
        list(ids) if ids is not None else [f"id-{first + row}" for row in range(len(vectors))]
    )
    vectors = vectors.copy()
    vectors[list(failed)] = np.nan
    return ChunkVectors(
        positions=np.arange(first, first + len(vectors)),
        ids=names,
        vectors=vectors,
        errors=[FailedRecord(first + row, names[row], ErrorCode.EMPTY, "the text is empty") for row in sorted(failed)],
        truncations=[TruncatedRecord(first + row, names[row], 256, 7) for row in sorted(truncated)],
        kept=kept,
        tokens=None if tokens is None else np.array(tokens),
    )
