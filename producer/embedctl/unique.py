"""Finds ids that occur twice, among more of them than fit into memory."""

from __future__ import annotations

import hashlib
import heapq
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from embedctl.records import Record
from embedctl_config.errors import InputError

#: An id and where it stands. The digest is 128 bits long: among 100 million ids, two that differ have the same one with
#: a probability of 1e-23.
_ENTRY: np.dtype[np.void] = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<u8")])
Entries = npt.NDArray[np.void]
#: Entries in memory (24 bytes each). More of them go to the disk.
_HELD = 2**18
#: Files on the disk: an id's digest decides its file. Of 100 million ids, each file has 9 MB, and is sorted in memory.
_FILES = 256
#: The largest `high` in each file but the last.
_ENDS = np.arange(1, _FILES, dtype=np.uint64) * np.uint64(2**64 // _FILES) - np.uint64(1)
#: Pairs of equal ids that are named.
_NAMED = 10


class UniqueIds:
    """Takes ids, and tells which of them are equal. A context manager, which removes what it has written.

    Attributes:
        count: how many ids have been found that were there before.
        first: some pairs of places with equal ids: that of the later one, and that of one before it.

    Args:
        named: how many pairs.
        last: keep the last place of each id rather than the first.
        others: called with the places that are not kept (uint64), each once.
    """

    def __init__(
        self,
        named: int = _NAMED,
        *,
        last: bool = False,
        others: Callable[[npt.NDArray[np.uint64]], None] | None = None,
    ) -> None:
        self.count = 0
        self._last, self._others = last, others
        self._named = named
        self.first: list[tuple[int, int]] = []
        self._bytes = bytearray(_HELD * _ENTRY.itemsize)
        self._held = np.frombuffer(self._bytes, _ENTRY)
        self._used = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            with suppress(OSError):
                self._folder.cleanup()

    def add(self, label: str, place: int) -> None:
        """Take an id.

        Args:
            place: a number by which the caller finds it again, larger than that of the id before, below 2**64.

        Raises:
            InputError: there is no room for temporary files.
        """
        if self._used == _HELD:
            with _explained():
                self._spill()
        at = self._used * _ENTRY.itemsize
        digest = hashlib.blake2b(label.encode(), digest_size=16).digest()
        self._bytes[at : at + _ENTRY.itemsize] = digest + place.to_bytes(8, "little")
        self._used += 1

    def find(self) -> None:
        """Compare all ids. Memory holds the ids of one file.

        Raises:
            InputError: there is no room for temporary files.
        """
        if self._folder is None:
            self._distinct(self._held[: self._used])
            return
        with _explained():
            self._spill()
            for file in Path(self._folder.name).iterdir():
                self._distinct(np.fromfile(file, _ENTRY))

    def _spill(self) -> None:
        """Append what is held to the files, each id once, so that no file is large because an id is frequent."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="embedctl-ids-")
        held = self._distinct(self._held[: self._used])
        ends = np.searchsorted(held["high"], _ENDS, side="right")
        for number, part in enumerate(np.split(held, ends)):
            with Path(self._folder.name, str(number)).open("ab") as stream:
                stream.write(part.tobytes())
        self._used = 0

    def _distinct(self, entries: Entries) -> Entries:
        """The entry of each id that is kept, sorted by digest. The others are counted."""
        entries = entries[np.lexsort((entries["low"], entries["high"]))]  # equal ids stay in the order of their places
        new = np.ones(len(entries), bool)
        new[1:] = (entries["high"][1:] != entries["high"][:-1]) | (entries["low"][1:] != entries["low"][:-1])
        distinct, again = entries[new], np.flatnonzero(~new)
        if len(again):
            pairs = zip(
                entries["place"][again].tolist(), distinct["place"][np.cumsum(new)[again] - 1].tolist(), strict=True
            )
            self.count += len(again)
            self.first = heapq.nsmallest(self._named, (*self.first, *pairs))
            kept = np.roll(new, -1) if self._last else new  # the entry before a new id is the last one of its own
            if self._others is not None:
                self._others(entries["place"][~kept])
            distinct = entries[kept]
        return distinct


def checked(records: Iterable[Record]) -> Iterator[Record]:
    """The same records; after the last one, the error if two have the same id.

    Raises:
        InputError: two have; it names their positions. Or the disk of temporary files is full.
    """
    with UniqueIds() as ids:
        for position, record in enumerate(records):
            if record.id is not None:
                ids.add(record.id, position)
            yield record
        ids.find()
    if ids.count:
        raise repeated(ids.count, [f"record {again}: its id is that of record {before}" for again, before in ids.first])


def repeated(count: int, lines: list[str]) -> InputError:
    """The error for ids that occur twice. It names some of them."""
    what = "1 id is" if count == 1 else f"{count:,} ids are"
    more = ["…"] if count > len(lines) else []
    return InputError(f"{what} not unique, and ids must be. Rename them, or give --duplicates all", *lines, *more)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"checking that ids are unique takes 24 bytes for each in {tempfile.gettempdir()}: {error.strerror}. Make "
            "room there, or set TMPDIR"
        ) from error
