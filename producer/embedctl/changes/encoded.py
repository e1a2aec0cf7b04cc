"""The results of a job, taken in other pieces than its chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from embedctl.results import ChunkVectors
from embedctl_config.errors import JobFailed


class Encoded:
    """The results of a job, taken up to one position after the other."""

    def __init__(self, chunks: Iterator[ChunkVectors]) -> None:
        self._chunks = chunks
        self._held: ChunkVectors | None = None
        self._next = 0
        self._failed: JobFailed | None = None

    def up_to(self, end: int) -> list[ChunkVectors]:
        """The results before a position that were not taken yet. Those of records that were not encoded are missing."""
        parts = []
        while self._next < end:
            if self._held is None:
                self._held = self._more()
            if self._held is None:
                break
            cut = int(np.searchsorted(self._held.positions, end))
            if cut:
                parts.append(_slice(self._held, 0, cut))
                self._next = int(self._held.positions[cut - 1]) + 1
            rest = len(self._held.positions) - cut
            self._held = _slice(self._held, cut, cut + rest) if rest else None
            if rest:
                self._next = end
        return parts

    def finish(self) -> None:
        """See the job's end.

        Raises:
            JobFailed: its error budget ended it.
        """
        while self._more() is not None:
            pass
        if self._failed is not None:
            raise self._failed

    def _more(self) -> ChunkVectors | None:
        """The next chunk with records; None at the end."""
        try:
            return next((chunk for chunk in self._chunks if len(chunk.positions)), None)
        except JobFailed as error:  # what is to be copied is copied first
            self._failed = error
            return None


def _slice(chunk: ChunkVectors, begin: int, end: int) -> ChunkVectors:
    positions = chunk.positions[begin:end]
    there = set(positions.tolist())
    return dataclasses.replace(
        chunk,
        positions=positions,
        ids=chunk.ids[begin:end],
        vectors=chunk.vectors[begin:end],
        errors=[error for error in chunk.errors if error.position in there],
        truncations=[cut for cut in chunk.truncations if cut.position in there],
        kept=None if chunk.kept is None else chunk.kept[begin:end],
        tokens=None,
        digests=None if chunk.digests is None else chunk.digests[begin:end],
    )
