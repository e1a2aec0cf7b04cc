"""Encodes a chunk that is suspect, or failed as a whole: record by record, each announced before it is touched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from embedctl_config.wire import ChunkInput, ErrorCode, RecordError, Truncation
from embedctl_workers.encoding.device_use import SOLE_USE, DeviceUse
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk

_DEADLY = RecordError(0, ErrorCode.CRASHED_WORKER, "the worker died each time it came to this record")
_POISONOUS = RecordError(0, ErrorCode.ENCODE_ERROR, "two workers could encode nothing more after this record")


def encode_carefully(
    encoder: ChunkEncoder,
    chunk: ChunkInput,
    options: Mapping[str, Any],
    use: DeviceUse = SOLE_USE,
    *,
    given_up: Collection[int],
    announce: Callable[[int], None],
    poisonous: Collection[int] = (),
    first: Collection[int] = (),
    check: Callable[[], None] = lambda: None,
    about: Mapping[str, object] | None = None,
) -> EncodedChunk:
    """Encode a chunk so that, if the process dies, it is known at which record. Raises as :meth:`ChunkEncoder.encode`.

    Args:
        given_up: rows at which earlier owners died. They and equal records fail as `crashed_worker`, untouched.
        announce: called with each row before anything is done with it, and with -1 after the last row. What it raises
            is raised.
        poisonous: rows after which earlier owners fell sick. They and equal records fail as `encode_error`, untouched.
        first: the rows to begin with.
        check: called before the first row and after each row. What it raises is raised.
        about: as in :meth:`ChunkEncoder.prepare`.
    """
    vectors = np.full((len(chunk), encoder.dim_of(options)), np.nan, np.float32)
    errors: list[RecordError] = []
    truncations: list[Truncation] = []
    tokens = positions = 0
    counts = np.zeros(len(chunk), np.int64)
    doubtful: set[int] = set()
    elsewhere: set[int] = set()
    records = list(zip(chunk.kinds, chunk.texts, strict=True))
    hopeless = {records[row]: _POISONOUS for row in poisonous} | {records[row]: _DEADLY for row in given_up}
    check()
    for row in sorted(range(len(records)), key=lambda row: row not in first):
        record = records[row]
        if (failure := hopeless.get(record)) is not None:
            errors.append(replace(failure, row=row))
            continue
        announce(row)
        alone = encoder.encode_alone(chunk, row, options, use, about=about)
        vectors[row] = alone.vectors[0]
        errors += [RecordError(row, error.code, error.message) for error in alone.errors]
        truncations += [Truncation(row, cut.used, cut.lost) for cut in alone.truncations]
        tokens += alone.tokens
        positions += alone.positions
        counts[row] = alone.counts[0]
        if alone.doubtful:
            doubtful.add(row)
        if alone.elsewhere:
            elsewhere.add(row)
        check()
    announce(-1)
    return EncodedChunk(
        vectors,
        sorted(errors, key=lambda error: error.row),
        sorted(truncations, key=lambda cut: cut.row),
        tokens,
        positions,
        counts,
        frozenset(doubtful),
        frozenset(elsewhere),
    )
