"""Which record's vector comes from where."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import IO

import numpy as np
import numpy.typing as npt

from embedctl.changes.cache import Hits
from embedctl.changes.earlier import Earlier
from embedctl.changes.join import COST, ENTRY, digests_of, entries, places_in, spilled
from embedctl.digests import DIGEST_BYTES, as_rows, digest_of
from embedctl.records import Record
from embedctl.runs import Runs, explained, parts_of
from embedctl_config.errors import InputError

#: In a plan, a record that is to be encoded. A number from 0 on is a row of the earlier output, and from FIRST_HIT down
#: a hit of the cache.
ENCODE, FIRST_HIT = -1, -2
_SLICE = 8192


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the vector of each record of a corpus comes from.

    Attributes:
        sources: int64, one for each record: ENCODE, a row of the earlier output, or FIRST_HIT minus a hit's number.
        marks: a file with 32 bytes for each record, which identify its text, its id and its kept fields.
        compared: the earlier output, if there is one.
        hits: what the cache had.
    """

    sources: npt.NDArray[np.int64]
    marks: IO[bytes]
    compared: Earlier | None
    hits: Hits

    @property
    def earlier(self) -> Earlier | None:
        """The earlier output, if vectors of it are copied."""
        return self.compared if self.unchanged else None

    @property
    def unchanged(self) -> int:
        """Records that are copied from the earlier output."""
        return int(np.count_nonzero(self.sources >= 0))

    @property
    def cached(self) -> int:
        """Records that are taken from the cache."""
        return int(np.count_nonzero(self.sources <= FIRST_HIT))

    @property
    def to_encode(self) -> int:
        """Records that a job is to encode."""
        return int(np.count_nonzero(self.sources == ENCODE))

    def difference(self, records: Iterable[Record]) -> Iterator[Record]:
        """Of the corpus, the records to encode.

        Raises:
            InputError: it is not the same corpus any more.
        """
        marks = self.all_marks()
        for position, record in enumerate(records):
            if position >= len(self.sources):
                raise changed(position)
            mark = next(marks)
            if self.sources[position] == ENCODE:
                if mark_of(record) != mark:
                    raise changed(position)
                yield record
        if next(marks, None) is not None:
            raise changed(len(self.sources))

    def all_marks(self) -> Iterator[bytes]:
        """The marks of all records."""
        for first in range(0, len(self.sources), _SLICE):
            self.marks.seek(first * DIGEST_BYTES)
            held = self.marks.read(_SLICE * DIGEST_BYTES)
            for at in range(0, len(held), DIGEST_BYTES):
                yield held[at : at + DIGEST_BYTES]

    def key(self, *deciding: object) -> str:
        """A name for the records to encode and for what decides about their vectors, in hexadecimal."""
        found = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode())
        for first in range(0, len(self.sources), _SLICE):
            self.marks.seek(first * DIGEST_BYTES)
            marks = as_rows(self.marks.read(_SLICE * DIGEST_BYTES))
            found.update(marks[self.sources[first : first + _SLICE] == ENCODE].tobytes())
        return found.hexdigest()


def mark_of(record: Record) -> bytes:
    """What tells whether a record is still the same: a digest of all that it holds."""
    found = hashlib.sha256()
    for part in (bytes([record.kind]), record.text, None if record.id is None else record.id.encode(), record.kept):
        found.update(b"\0" if part is None else b"\1" + len(part).to_bytes(8, "little") + part)
    return found.digest()


def changed(position: int) -> InputError:
    """The error for a corpus that changed between two readings."""
    return InputError(
        f"the corpus changed while it was read, at record {position}: leave it alone until the command ends, and start "
        "the command again"
    )


def compare(
    records: Iterable[Record],
    earlier: Earlier | None,
    find: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.int64]] | None,
    hits: Hits,
    *,
    copies: bool,
) -> Plan:
    """Compare a corpus with an earlier output and with a cache. What is many is on the disk meanwhile.

    Args:
        earlier: None if there is none.
        find: the number of the cache's hit for each digest, -1 where there is none, which `hits` then holds.
        copies: whether the vectors of the earlier output may be copied.

    Raises:
        InputError: a record can't be read, or there is no room for temporary files.
        OutputError: the earlier output is damaged.
    """
    finds = copies or find is not None
    with spilled(ENTRY) as old, spilled(ENTRY) as new:
        if earlier is not None and copies:
            _take_in(earlier, old)
        marks, count = _read(records, new if finds else None)
        sources = np.full(count, ENCODE, np.int64)
        for there, wanted in parts_of(old, new):
            places = places_in(there, wanted)
            if find is not None:
                missed = np.flatnonzero(places < 0)
                found = find(digests_of(wanted[missed]))
                places[missed] = np.where(found < 0, ENCODE, FIRST_HIT - found)
            sources[wanted["at"].astype(np.int64)] = places
    return Plan(sources, marks, earlier, hits)


def _take_in(earlier: Earlier, old: Runs) -> None:
    first = 0
    for rows in earlier.read():
        old.add(entries(rows.digests, rows.ids, first)[rows.usable])
        first += len(rows.ids)


def _read(records: Iterable[Record], new: Runs | None) -> tuple[IO[bytes], int]:
    """Read the corpus; returns the marks of its records, and how many they are."""
    with explained(COST):
        marks = tempfile.TemporaryFile()  # noqa: SIM115  (the plan keeps it)
    source = iter(records)
    count = 0
    while held := list(islice(source, _SLICE)):
        if new is not None:
            new.add(entries(as_rows(b"".join(map(digest_of, held))), [record.id for record in held], count))
        with explained(COST):
            marks.write(b"".join(map(mark_of, held)))
        count += len(held)
    with explained(COST):
        marks.flush()
    return marks, count
