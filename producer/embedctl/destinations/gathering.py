"""Makes batches of the chunks of a job: each row with its id and its source, in the type that is stored."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from embedctl.destinations.ids import NAMED, LeftOut, no_id
from embedctl.destinations.interface import Batch, Contract
from embedctl.destinations.loop import Refused, RefusedRecord
from embedctl.waiting.results import ChunkVectors, Vectors
from embedctl_config.errors import InputError


@dataclass(slots=True)
class Gathered:
    """Records of consecutive chunks that are not written yet. `positions_for` is the job, if ids are made of it and of
    positions; empty if they are the records' own. Rows hold kept fields if it `keeps` them. `refuse` takes a record
    whose vector can't be stored."""

    contract: Contract
    left_out: LeftOut | None
    positions_for: str
    keeps: bool
    refuse: Refused
    chunks: list[ChunkVectors] = field(default_factory=list)
    rows: int = 0
    size: int = 0

    def add(self, chunk: ChunkVectors) -> None:
        self.chunks.append(chunk)
        self.rows += len(chunk.positions)
        self.size += _bytes_of(chunk)

    def taken(self, most_bytes: int) -> Iterator[Batch]:
        """All that is gathered, in batches of about so many bytes; nothing is left then. InputError: a record has no
        id, or an id occurs twice."""
        parts = [part for chunk in self.chunks if len(part := self._rows(chunk))]
        pieces = -(-self.size // most_bytes)
        self.chunks, self.rows, self.size = [], 0, 0
        if not parts:
            return
        whole = _joined(parts)
        _refuse_twice(whole)
        rows_of_each = -(-len(whole) // max(1, pieces))
        for first in range(0, len(whole), rows_of_each):
            yield whole.part(slice(first, first + rows_of_each))

    def _rows(self, chunk: ChunkVectors) -> Batch:
        good = ~np.isin(chunk.positions, [error.position for error in chunk.errors])
        if self.left_out is not None:
            good &= ~self.left_out.among(chunk.positions)
        rows = np.flatnonzero(good)
        vectors = _cast(chunk.vectors[rows], self.contract.dtype)
        fits = np.isfinite(vectors).all(axis=1)
        for row in rows[~fits].tolist():
            what = "is not finite" if not np.isfinite(chunk.vectors[row]).all() else f"overflows {self.contract.dtype}"
            self.refuse(RefusedRecord(int(chunk.positions[row]), self._id(chunk, row), f"the vector {what}"))
        rows, vectors = rows[fits], vectors[fits]
        at = rows.tolist()
        kept, digests, source = chunk.kept, chunk.digests, self.contract.source
        return Batch(
            [self._id(chunk, row) for row in at],
            vectors,
            None if digests is None else [source(digests[row].tobytes()) for row in at],
            [json.dumps(kept[row], ensure_ascii=False) for row in at] if self.keeps and kept is not None else None,
            chunk.positions[rows],
        )

    def _id(self, chunk: ChunkVectors, row: int) -> str:
        if self.positions_for:
            return f"{self.positions_for}:{chunk.positions[row]}"
        label = chunk.ids[row]
        if label is None:
            raise no_id(1, [int(chunk.positions[row])])
        return label


def _cast(vectors: Vectors, dtype: str) -> npt.NDArray[np.float32] | npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):  # what overflows is refused by name
        return vectors.astype(dtype, copy=False)


def _bytes_of(chunk: ChunkVectors) -> int:
    names = sum(len(label) for label in chunk.ids if label is not None)
    return chunk.vectors.nbytes + names + (0 if chunk.kept is None else sum(len(str(each)) for each in chunk.kept))


def _joined(parts: list[Batch]) -> Batch:
    first = parts[0]
    return Batch(
        [label for part in parts for label in part.ids],
        np.concatenate([part.vectors for part in parts]),
        None if first.sources is None else [source for part in parts for source in part.sources or ()],
        None if first.kept is None else [fields for part in parts for fields in part.kept or ()],
        np.concatenate([part.positions for part in parts if part.positions is not None]),
    )


def _refuse_twice(batch: Batch) -> None:
    """Refuse ids that occur twice: they were unique when they were looked at, and the corpus has changed since."""
    if len(set(batch.ids)) < len(batch):
        twice = [label for label, count in Counter(batch.ids).items() if count > 1]
        raise InputError(f"ids occur twice in the job: {', '.join(map(repr, twice[:NAMED]))}")
