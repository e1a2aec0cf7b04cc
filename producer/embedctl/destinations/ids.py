"""The ids under which records stand in a database: every record has one, and no two have the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from embedctl.corpus.unique import UniqueIds, repeated
from embedctl.waiting.results import ChunkVectors
from embedctl_config.errors import InputError
from embedctl_config.record_ids import RecordId

#: Records, or ids, that a message names.
NAMED = 10
_FIX = "use --duplicates position, which makes ids of the job and the position (duplicates= in Python)"
#: Why no id may occur twice, and what to do.
ONE_OF_EACH = (
    f"a database keeps one record for each: write the first or the last one with --duplicates first|last, or {_FIX}"
)


class Duplicates(StrEnum):
    """Which record is written if several have the same id. With POSITION, none have: ids are made of positions."""

    ERROR = "error"
    FIRST = "first"
    LAST = "last"
    POSITION = "position"


class LeftOut:
    """Positions of records that are not written, one bit for each record of the job."""

    def __init__(self, records: int) -> None:
        self._bits = np.zeros((records + 7) // 8, np.uint8)
        self.count = 0

    def add(self, positions: npt.NDArray[np.uint64]) -> None:
        """Leave out these, which were not left out before."""
        at = positions.astype(np.int64)
        np.bitwise_or.at(self._bits, at >> 3, (1 << (at & 7)).astype(np.uint8))
        self.count += len(at)

    def among(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of some positions are left out."""
        found: npt.NDArray[np.bool_] = (self._bits[positions >> 3] >> (positions & 7)) & 1 == 1
        return found


def decided(heads: Iterable[ChunkVectors], records: int, duplicates: Duplicates) -> LeftOut:
    """Look at the ids of all records of a job that have a vector, before the first one is written; its chunks need no
    vectors. InputError: one has none; or two have the same one, and neither is to be left out.

    Memory holds a bit for each record, and the ids as :class:`UniqueIds` holds them.
    """
    left_out = LeftOut(records)
    nameless: list[int] = []
    without = 0
    with UniqueIds(last=duplicates is Duplicates.LAST, others=left_out.add) as ids:
        for position, label in _with_vectors(heads):
            if label is None:
                without += 1
                nameless += [position][: NAMED - len(nameless)]
            else:
                ids.add(label, position)
        ids.find()
    if without:
        raise no_id(without, nameless)
    if ids.count and duplicates is Duplicates.ERROR:
        raise repeated(ids.count, ids.lines, ONE_OF_EACH)
    return left_out


def _with_vectors(heads: Iterable[ChunkVectors]) -> Iterator[tuple[int, RecordId | None]]:
    for chunk in heads:
        failed = {error.position for error in chunk.errors}
        there = zip(chunk.positions.tolist(), chunk.ids, strict=True)
        yield from ((position, label) for position, label in there if position not in failed)


def no_id(count: int, first: list[int]) -> InputError:
    """The error for records without an id. It names some of them by their positions."""
    what = "1 record has no id" if count == 1 else f"{count:,} records have no id"
    names = ", ".join(map(str, first)) + (", …" if count > len(first) else "")
    return InputError(f"{what}, and a database knows records by their ids: {_FIX}. Positions: {names}")
