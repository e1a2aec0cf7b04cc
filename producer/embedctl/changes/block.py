"""Consecutive records of an output, put together from vectors that are copied and results of a job."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl.changes.spool import Copied, Cut
from embedctl.digests import DIGEST_BYTES, as_rows, digest_of
from embedctl.records import Record
from embedctl.results import ChunkVectors, FailedRecord, TruncatedRecord, Vectors
from embedctl_config.errors import OutputError


class Block:
    """Consecutive records; some may be missing.

    Args:
        size: how many records.
        dim: dimensions of a vector.
    """

    def __init__(self, size: int, dim: int) -> None:
        self._there = np.zeros(size, bool)
        self._vectors: Vectors = np.full((size, dim), np.nan, np.float32)
        self._digests = np.zeros((size, DIGEST_BYTES), np.uint8)
        self._ids: list[str | None] = [None] * size
        self._kept: list[Mapping[str, Any]] = [{}] * size
        self._errors: list[tuple[int, FailedRecord]] = []
        self._cuts: dict[int, Cut] = {}

    def copy(self, rows: npt.NDArray[np.int64], copied: Copied, records: Sequence[Record], where: str) -> None:
        """Take vectors that were there already; the records tell all else.

        Raises:
            OutputError: they are not of these records' texts, or not finite. What they are copied from was changed.
        """
        digests = as_rows(b"".join(digest_of(records[row]) for row in rows.tolist()))
        if not np.array_equal(digests, copied.digests) or not np.isfinite(copied.vectors).all():
            raise OutputError(f"{where} is damaged, or was changed meanwhile: start again, or give --force")
        self._there[rows] = True
        self._vectors[rows] = copied.vectors
        self._digests[rows] = digests
        for row, cut in zip(rows.tolist(), copied.cuts, strict=True):
            record = records[row]
            self._ids[row] = record.id
            if record.kept is not None:
                self._kept[row] = json.loads(record.kept)
            if cut != (0, 0):
                self._cuts[row] = cut

    def lay_in(self, rows: npt.NDArray[np.int64], part: ChunkVectors, records: Sequence[Record] | None) -> None:
        """Take results of the job.

        Args:
            records: of the block, to see that the results are theirs.
        """
        if part.digests is None:
            raise OutputError("the job's results have no digests: submit it again with --force")
        if records is not None:
            mine = as_rows(b"".join(digest_of(records[row]) for row in rows.tolist()))
            if not np.array_equal(mine, part.digests):
                raise OutputError("the job's results are not those of the corpus: submit it again with --force")
        self._there[rows] = True
        self._vectors[rows] = part.vectors
        self._digests[rows] = part.digests
        row_of = dict(zip(part.positions.tolist(), rows.tolist(), strict=True))
        for at, row in enumerate(rows.tolist()):
            self._ids[row] = part.ids[at]
            if part.kept is not None:
                self._kept[row] = part.kept[at]
        self._errors += ((row_of[error.position], error) for error in part.errors)
        self._cuts |= {row_of[cut.position]: (cut.used, cut.lost) for cut in part.truncations}

    def as_chunk(self, first: int, precision: str, *, keeps: bool) -> ChunkVectors:
        """The records that are there.

        Args:
            first: position of the block's first record.
            keeps: whether the job keeps fields.
        """
        rows = np.flatnonzero(self._there)
        each = rows.tolist()
        return ChunkVectors(
            positions=(rows + first).astype(np.int64),
            ids=[self._ids[row] for row in each],
            vectors=self._vectors[rows],
            errors=[
                dataclasses.replace(error, position=first + row)
                for row, error in sorted(self._errors, key=lambda each: each[0])
            ],
            truncations=[
                TruncatedRecord(first + row, self._ids[row], used, lost)
                for row, (used, lost) in sorted(self._cuts.items())
            ],
            precision=precision,
            kept=[self._kept[row] for row in each] if keeps else None,
            digests=self._digests[rows],
        )
