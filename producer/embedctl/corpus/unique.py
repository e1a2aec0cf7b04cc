"""Finds ids that occur twice, among more of them than fit into memory."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import numpy as np
import numpy.typing as npt

from embedctl.corpus.records import Record
from embedctl.corpus.runs import NAME, Entries, Runs, parts_of, starts_of
from embedctl_config.errors import InputError
from embedctl_config.record_ids import RecordId, to_wire

#: Entries in memory (24 bytes each). More of them go to the disk.
_HELD = 2**18
_COST = "checking that ids are unique takes 24 bytes for each"
#: Pairs of equal ids that are named.
_NAMED = 10
MUST_BE = "ids must be. Rename them, or give --duplicates all"


class UniqueIds:
    """Takes ids, and tells how many were there before (`count`), and some pairs of places with equal ids (`first`):
    that of the later one, and that of one before it; `lines` names them. A context manager, which removes what it has
    written.

    It keeps the first place of each id, or with `last` the last one; `others` is called with the places that are not
    kept (uint64), each once. `cost` is as for :class:`Runs`.
    """

    def __init__(
        self,
        named: int = _NAMED,
        *,
        last: bool = False,
        others: Callable[[npt.NDArray[np.uint64]], None] | None = None,
        cost: str = _COST,
    ) -> None:
        self.count = 0
        self._last, self._others = last, others
        self._named = named
        self.first: list[tuple[int, int]] = []
        self._bytes = bytearray(_HELD * NAME.itemsize)
        self._held = np.frombuffer(self._bytes, NAME)
        self._used = 0
        self._runs = Runs(NAME, 1, cost)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.__exit__()

    def add(self, label: RecordId, place: int) -> None:
        """Take an id, and a number by which the caller finds it again, larger than that of the id before, below 2**64.
        Raises InputError if there is no room for temporary files."""
        self.add_digest(hashlib.blake2b(to_wire(label), digest_size=16).digest(), place)

    def add_digest(self, digest: bytes, place: int) -> None:
        """As :meth:`add`, for 16 bytes of a digest."""
        if self._used == _HELD:
            self._spill()
        at = self._used * NAME.itemsize
        self._bytes[at : at + NAME.itemsize] = digest + place.to_bytes(8, "little")
        self._used += 1

    def find(self) -> None:
        """Compare all ids. Memory holds the ids of one file. Raises InputError if there is no room for temporary
        files."""
        if not self._runs.on_disk:
            self._distinct(self._held[: self._used])
            return
        self._spill()
        for (part,) in parts_of(self._runs):
            self._distinct(part)

    @property
    def lines(self) -> list[str]:
        """The pairs in words, for places that are positions."""
        return [f"record {again}: its id is that of record {before}" for again, before in self.first]

    def _spill(self) -> None:
        """Hand over what is held, each id once, so that no file is large because an id is frequent."""
        self._runs.add(self._distinct(self._held[: self._used]))
        self._used = 0

    def _distinct(self, entries: Entries) -> Entries:
        """The entry of each id that is kept, sorted by digest. The others are counted."""
        entries = entries[np.lexsort((entries["d1"], entries["d0"]))]  # equal ids stay in the order of their places
        new = starts_of(entries, ("d0", "d1"))
        distinct, again = entries[new], np.flatnonzero(~new)
        if len(again):
            pairs = zip(entries["at"][again].tolist(), distinct["at"][np.cumsum(new)[again] - 1].tolist(), strict=True)
            self.count += len(again)
            self.first = heapq.nsmallest(self._named, (*self.first, *pairs))
            kept = np.roll(new, -1) if self._last else new  # the entry before a new id is the last one of its own
            if self._others is not None:
                self._others(entries["at"][~kept])
            distinct = entries[kept]
        return distinct


def checked(records: Iterable[Record]) -> Iterator[Record]:
    """The same records. After the last one, raises InputError if two have the same id; it names their positions.
    Likewise if the disk of temporary files is full."""
    with UniqueIds() as ids:
        for position, record in enumerate(records):
            if record.id is not None:
                ids.add(record.id, position)
            yield record
        ids.find()
    if ids.count:
        raise repeated(ids.count, ids.lines)


def repeated(count: int, lines: list[str], why: str = MUST_BE) -> InputError:
    """The error for so many ids that occur twice, some of which are named; `why` they may not."""
    what = "1 id is" if count == 1 else f"{count:,} ids are"
    more = ["…"] if count > len(lines) else []
    return InputError(f"{what} not unique, and {why}", *lines, *more)
