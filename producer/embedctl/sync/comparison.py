"""Compares a corpus with a destination, by the destination's rows alone, and deletes what is gone.

The rows of a database are found by their ids, and those of a file, or of a cache, by their texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import as_rows, digest_of
from embedctl.corpus.records import Record
from embedctl.corpus.runs import Entries, Runs, parts_of
from embedctl.destinations.interface import Contract, Destination, Row
from embedctl.destinations.writing import halved, sources_of, tried
from embedctl.sync.known import Known
from embedctl_config.errors import DestinationRefused, InputError, OutputError
from embedctl_config.record_ids import IdType, to_wire

T = TypeVar("T")

#: A record that is nowhere.
LACKING = -1
#: Ids in memory; more of them go to the disk.
_HELD = 2**17
_COST = "comparing the ids of the corpus with those of the destination takes up to 32 bytes for each"
#: Rows that are compared or deleted together.
_BLOCK, _DELETED = 10_000, 1_000
#: Rows that a destination refuses to delete: after so many, it is asked for no more, and so many are named.
_REFUSED, _NAMED = 100, 10
#: An id of the corpus: its digest of 128 bits.
_NAME = np.dtype([("d0", "<u8"), ("d1", "<u8")])
#: A row as it was read: digests of its id and of its source.
_ROW = np.dtype([("d0", "<u8"), ("d1", "<u8"), ("s0", "<u8"), ("s1", "<u8")])


@dataclass(frozen=True, slots=True)
class Limit:
    """How many rows may be deleted: a number, or a share of all rows from 0 to 1."""

    number: int = 0
    share: float | None = None

    def of(self, rows: int) -> int:
        return self.number if self.share is None else int(self.share * rows + 1e-6)  # 0.29 × 100 is below 29


@dataclass(slots=True)
class Difference:
    """What of a corpus a destination lacks, and what both had before. A context manager.

    Attributes:
        found: int8, one for each record of the corpus: where there is a row of its text, as the number of what was
            asked for it, or LACKING.
        digest: over all records of the corpus.
        key: a digest over those that are lacking, in hexadecimal.
        names: the ids of the corpus, if it was compared by them.
        rows: the rows of the destination before the corpus was read, if any are to be deleted.
        row_count: how many these are.
    """

    found: npt.NDArray[np.int8]
    digest: bytes
    key: str
    names: Runs = field(repr=False, default_factory=lambda: Runs(_NAME, _HELD, _COST))
    rows: Runs = field(repr=False, default_factory=lambda: Runs(_ROW, _HELD, _COST))
    row_count: int = 0

    def __enter__(self) -> Difference:
        return self

    def __exit__(self, *error: object) -> None:
        self.names.__exit__(*error)
        self.rows.__exit__(*error)

    def count(self, number: int) -> int:
        """How many records have a row there, or are lacking."""
        return int(np.count_nonzero(self.found == number))

    @property
    def unchanged(self) -> int:
        return len(self.found) - self.to_encode

    @property
    def to_encode(self) -> int:
        """Records that are lacking, or are there from another text."""
        return self.count(LACKING)

    def again(self, records: Iterable[Record]) -> Iterator[tuple[Record, int]]:
        """The corpus read once more: each record, and where it was found. InputError: it is not the same corpus any
        more."""
        digest, count = hashlib.sha256(), 0
        for record in records:
            if count == len(self.found):
                raise corpus_changed()
            digest.update(_mark(record))
            yield record, int(self.found[count])
            count += 1
        if count != len(self.found) or digest.digest() != self.digest:
            raise corpus_changed()

    def taken_from(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records that are lacking, of the corpus read once more. Raises as :meth:`again`."""
        return (record for record, found in self.again(records) if found == LACKING)


def corpus_changed() -> InputError:
    return InputError("the corpus changed while it was read: leave it alone until the command ends, and run it again")


def compare(
    destination: Destination, contract: Contract, records: Iterator[Record], *, deletes: bool = True
) -> Difference:
    """Compare a corpus, read once, with the rows of a destination. It is opened, unless it is not there. InputError:
    the corpus can't be read, a record has no id, or there is no room for temporary files.

    If the rows that the corpus lacks are to be deleted, all rows are read before the corpus is, so that a row that
    another run writes later, perhaps of a newer corpus, is not taken for one that is gone.
    """
    first = next(records, None)
    if first is not None and first.id is not None:
        contract = replace(contract, ids=str(IdType.of(first.id)))
    records = records if first is None else chain([first], records)
    holds_rows = tried(lambda: destination.open(contract))
    rows, row_count = Runs(_ROW, _HELD, _COST), 0
    for there in _blocks(destination.ids(), _BLOCK) if deletes and holds_rows else ():
        rows.add(_entries(there))
        row_count += len(there)
    names = Runs(_NAME, _HELD, _COST)

    def found(block: list[Record]) -> npt.NDArray[np.int8]:
        ids = destination.held([record.id for record in block if record.id is not None])
        names.add(_digests(map(to_wire, ids)))
        sources = sources_of(destination, ids) if holds_rows else {}
        wanted = contract.sources(map(digest_of, block))
        is_there = (sources.get(label) == source for label, source in zip(ids, wanted, strict=True))
        return np.array([0 if each else LACKING for each in is_there], np.int8)

    return Difference(*_compared(records, destination.batch_records, found), names, rows, row_count)


def compare_texts(known: Sequence[Known], records: Iterator[Record]) -> Difference:
    """Compare a corpus, read once, with vectors that are known by their texts. The first that has one counts.
    InputError: the corpus can't be read, or there is no room for temporary files."""

    def found(block: list[Record]) -> npt.NDArray[np.int8]:
        digests = as_rows(b"".join(map(digest_of, block)))
        places = np.full(len(block), LACKING, np.int8)
        for number, each in enumerate(known):
            asked = np.flatnonzero(places == LACKING)
            places[asked[each.has(digests[asked])]] = number
        return places

    return Difference(*_compared(records, _BLOCK, found))


def _compared(
    records: Iterator[Record], size: int, find: Callable[[list[Record]], npt.NDArray[np.int8]]
) -> tuple[npt.NDArray[np.int8], bytes, str]:
    """Look for all records, block by block; returns the first attributes of a :class:`Difference`."""
    found, digest, key = [np.empty(0, np.int8)], hashlib.sha256(), hashlib.sha256()
    for block in _blocks(records, size):
        places, marks = find(block), list(map(_mark, block))
        digest.update(b"".join(marks))
        key.update(b"".join(compress(marks, (places == LACKING).tolist())))
        found.append(places)
    return np.concatenate(found), digest.digest(), key.hexdigest()


def delete_missing(destination: Destination, difference: Difference, limit: Limit) -> int:
    """Delete the rows of an open destination whose ids a corpus lacks; returns how many.

    A row that was written since the corpus was read stays. OutputError: there are more than the limit allows, and
    nothing is deleted; or it refuses to delete some of them, and the others are deleted.
    """
    count = sum(map(len, _gone(difference)))
    if count > (most := limit.of(difference.row_count)):
        raise OutputError(
            f"the corpus lacks {count:,} of the {difference.row_count:,} rows of {destination.name}, and at most "
            f"{most:,} may be deleted: nothing is deleted. If that is right, allow it with --delete-at-most"
        )
    if not count:
        return 0
    gone = np.sort(np.concatenate(list(_gone(difference))))
    deleted, refused = 0, list[str]()
    for block in _blocks(_rows_among(destination, gone), _DELETED):
        deleted += _delete(destination, block, refused)
        if len(refused) >= _REFUSED:
            break
    if refused:
        raise OutputError(
            f"{destination.name}: {deleted:,} rows that the corpus lacks were deleted, and {len(refused):,} were not: "
            + "; ".join(refused[:_NAMED])
        )
    return deleted


def _delete(destination: Destination, rows: list[Row], refused: list[str]) -> int:
    """Delete rows but those that the destination refuses to delete, such as one that another table refers to."""
    deleted = 0
    for row, found in halved(lambda some: destination.delete(rows[some]), 0, len(rows)):
        if isinstance(found, DestinationRefused):
            refused.append(f"{rows[row][0]!r}: {found}")
        else:
            deleted += found
    return deleted


def _gone(difference: Difference) -> Iterator[Entries]:
    for rows, names in parts_of(difference.rows, difference.names):
        names = np.sort(names)
        ids = rows[["d0", "d1"]].astype(_NAME)
        yield rows[~_among(names, ids)] if len(names) else rows


def _rows_among(destination: Destination, gone: Entries) -> Iterator[Row]:
    """Those of these rows that are still the same."""
    for block in _blocks(destination.ids(), _BLOCK):
        now = _entries(block)
        for row in np.flatnonzero(_among(gone, now)).tolist():
            yield block[row]


def _entries(rows: Sequence[Row]) -> Entries:
    made = np.empty(len(rows), _ROW)
    ids = _digests(to_wire(label) for label, _ in rows)
    sources = _digests(b"" if source is None else b"source" + source for _, source in rows)
    made["d0"], made["d1"], made["s0"], made["s1"] = ids["d0"], ids["d1"], sources["d0"], sources["d1"]
    return made


def _among(sorted_entries: Entries, some: Entries) -> npt.NDArray[np.bool_]:
    """Whether each entry is among the sorted ones. There is at least one sorted entry."""
    at = np.minimum(np.searchsorted(sorted_entries, some), len(sorted_entries) - 1)
    return np.asarray(sorted_entries[at] == some)


def _digests(words: Iterable[bytes]) -> Entries:
    """16 bytes for each, as a :data:`_NAME`."""
    return np.frombuffer(b"".join(hashlib.blake2b(word, digest_size=16).digest() for word in words), _NAME)


def _mark(record: Record) -> bytes:
    """A digest of what a job would hold of a record."""
    label = b"" if record.id is None else bytes([IdType.of(record.id).kind]) + to_wire(record.id)
    return hashlib.sha256(digest_of(record) + b"%d" % len(label) + label + (record.kept or b"")).digest()


def _blocks(some: Iterable[T], size: int) -> Iterator[list[T]]:
    each = iter(some)
    while block := list(islice(each, size)):
        yield block
