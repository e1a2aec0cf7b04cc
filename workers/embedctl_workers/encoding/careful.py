"""Encodes a chunk that is suspect, or failed as a whole: record by record, each announced before it is touched."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from embedctl_config.wire import ChunkInput, ErrorCode, RecordError
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
from embedctl_workers.encoding.prepared import DeviceUse

_DEADLY = RecordError(0, ErrorCode.CRASHED_WORKER, "the worker died each time it came to this record")
_POISONOUS = RecordError(0, ErrorCode.ENCODE_ERROR, "two workers could encode nothing more after this record")


class CarefulUse(DeviceUse):
    """The use of a device by a chunk that is encoded record by record. Subclasses say what is known of its rows.

    Attributes:
        given_up: rows at which earlier owners died. They and equal records fail as `crashed_worker`, untouched.
        poisonous: rows after which earlier owners fell sick. They and equal records fail as `encode_error`, untouched.
        first: the rows to begin with.
    """

    given_up: Collection[int] = ()
    poisonous: Collection[int] = ()
    first: Collection[int] = ()

    def announce(self, row: int) -> None:
        """Called with each row before anything is done with it, and with -1 after the last row."""

    def check(self) -> None:
        """Called before the first row and after each row."""


def encode_carefully(
    encoder: ChunkEncoder,
    chunk: ChunkInput,
    options: Mapping[str, Any],
    use: CarefulUse,
    *,
    about: Mapping[str, object] | None = None,
) -> EncodedChunk:
    """Encode a chunk so that, if the process dies, it is known at which record.

    `about` is as in :meth:`ChunkEncoder.prepare`. Raises as :meth:`ChunkEncoder.encode`, and what `use` raises.
    """
    vectors = encoder.nothing(len(chunk), options)
    counts = np.zeros(len(chunk), np.int64)
    records = list(zip(chunk.kinds, chunk.texts, strict=True))
    hopeless = {records[row]: _POISONOUS for row in use.poisonous} | {records[row]: _DEADLY for row in use.given_up}
    encoded: dict[int, EncodedChunk] = {}
    use.check()
    for row in sorted(range(len(records)), key=lambda row: row not in use.first):
        if records[row] in hopeless:
            continue
        use.announce(row)
        alone = encoded[row] = encoder.encode_alone(chunk, row, options, use, about=about)
        vectors[row], counts[row] = alone.vectors[0], alone.counts[0]
        use.check()
    use.announce(-1)
    errors = [replace(hopeless[record], row=row) for row, record in enumerate(records) if record in hopeless]
    errors += [replace(error, row=row) for row, alone in encoded.items() for error in alone.errors]
    return EncodedChunk(
        vectors=vectors,
        errors=sorted(errors, key=lambda error: error.row),
        truncations=[replace(cut, row=row) for row, alone in sorted(encoded.items()) for cut in alone.truncations],
        tokens=sum(alone.tokens for alone in encoded.values()),
        positions=sum(alone.positions for alone in encoded.values()),
        counts=counts,
        doubtful=frozenset(row for row, alone in encoded.items() if alone.doubtful),
        elsewhere=frozenset(row for row, alone in encoded.items() if alone.elsewhere),
    )
