"""Compares a corpus with a destination, by the destination's rows alone, and deletes what is gone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from embedctl.destinations.interface import Contract, Destination, Row
from embedctl.destinations.writing import sources_of, tried
from embedctl.digests import digest_of
from embedctl.records import Record
from embedctl.runs import NAME, Entries, Runs, missing_in, parts_of
from embedctl_config.errors import DestinationRefused, InputError, OutputError

#: Ids in memory; more of them go to the disk.
_HELD = 2**17
_COST = "comparing the ids of the corpus with those of the destination takes up to 64 bytes for each"
#: Rows that are compared or deleted together.
_BLOCK, _DELETED = 10_000, 1_000
#: Rows that a destination refuses to delete: after so many, it is asked for no more, and so many are named.
_REFUSED, _NAMED = 100, 10
#: What is the same as long as nobody has written a row: digests of its id and of its source.
_KEY = np.dtype([(name, "<u8") for name in ("d0", "d1", "s0", "s1")])
#: A row and where it stands.
_ROW = np.dtype([*NAME.descr, ("s0", "<u8"), ("s1", "<u8")])


@dataclass(frozen=True, slots=True)
class Limit:
    """How many rows may be deleted: a number, or a share of all rows.

    Attributes:
        share: 0 to 1, in place of the number.
    """

    number: int = 0
    share: float | None = None

    def of(self, rows: int) -> int:
        """The most of so many rows."""
        return self.number if self.share is None else int(self.share * rows)


@dataclass(slots=True)
class Difference:
    """What of a corpus a destination lacks, and what both had before. A context manager.

    Attributes:
        lacking: one for each record of the corpus, whether the destination lacks it.
        digest: over all records of the corpus.
        names: the ids of the corpus.
        rows: the rows of the destination before the corpus was read.
        row_count: how many these are.
    """

    lacking: npt.NDArray[np.bool_]
    digest: bytes
    names: Runs = field(repr=False)
    rows: Runs = field(repr=False)
    row_count: int

    def __enter__(self) -> Difference:
        return self

    def __exit__(self, *error: object) -> None:
        self.names.__exit__(*error)
        self.rows.__exit__(*error)

    @property
    def unchanged(self) -> int:
        """Records that are at the destination already."""
        return len(self.lacking) - self.to_encode

    @property
    def to_encode(self) -> int:
        """Records that it lacks, or has from another text."""
        return int(np.count_nonzero(self.lacking))

    def taken_from(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records that are lacking, of the corpus read once more.

        Raises:
            InputError: it is not the same corpus any more.
        """
        digest, count = hashlib.sha256(), 0
        for record in records:
            digest.update(_mark(record))
            if count < len(self.lacking) and self.lacking[count]:
                yield record
            count += 1
        if count != len(self.lacking) or digest.digest() != self.digest:
            raise InputError("the corpus changed while it was read: run the command again")


def compare(
    destination: Destination, contract: Contract, records: Iterator[Record], *, deletes: bool = True
) -> Difference:
    """Compare a corpus, read once, with the rows of a destination. It is opened, unless it is not there.

    Args:
        deletes: whether the rows that the corpus lacks are to be deleted. All rows are then read before the corpus is,
            so that a row that another run writes later, perhaps of a newer corpus, is not taken for one that is gone.

    Raises:
        OtherContract, DestinationUnavailable, OutputError: as the destination says.
        InputError: the corpus can't be read, a record has no id, or there is no room for temporary files.
    """
    holds_rows = tried(lambda: destination.open(contract))
    rows, row_count = Runs(_ROW, _HELD, _COST), 0
    for there in _blocks(destination.ids(), _BLOCK) if deletes and holds_rows else ():
        rows.add(_row_entries(there, row_count))
        row_count += len(there)
    names, digest, lacking = Runs(NAME, _HELD, _COST), hashlib.sha256(), [np.empty(0, bool)]
    count = 0
    while block := list(islice(records, min(_BLOCK, destination.batch_records))):
        ids = [str(record.id) for record in block]
        found = sources_of(destination, ids) if holds_rows else {}
        wanted = (contract.source(digest_of(record)) for record in block)
        lacking.append(np.array([found.get(label) != source for label, source in zip(ids, wanted, strict=True)], bool))
        for record in block:
            digest.update(_mark(record))
        names.add(_entries(ids, count))
        count += len(block)
    return Difference(np.concatenate(lacking), digest.digest(), names, rows, row_count)


def delete_missing(destination: Destination, difference: Difference, limit: Limit) -> int:
    """Delete the rows of an open destination whose ids a corpus lacks; returns how many.

    A row that was written since the corpus was read stays.

    Raises:
        OutputError: there are more than the limit allows; nothing is deleted. Or it refuses to delete some of them; the
            others are deleted. Or as the destination says.
        InputError: there is no room for temporary files.
    """
    count = sum(map(len, _gone(difference)))
    if count > (most := limit.of(difference.row_count)):
        raise OutputError(
            f"the corpus lacks {count:,} of the {difference.row_count:,} rows of {destination.name}, and at most "
            f"{most:,} may be deleted: nothing is deleted. If that is right, allow it with --delete-at-most"
        )
    if not count:
        return 0
    gone = np.sort(np.concatenate([part[list(_KEY.names or ())].astype(_KEY) for part in _gone(difference)]))
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
    try:
        return tried(lambda: destination.delete(rows))
    except DestinationRefused as error:
        if len(rows) == 1:
            refused.append(f"{rows[0][0]!r}: {error}")
            return 0
    half = len(rows) // 2
    return _delete(destination, rows[:half], refused) + _delete(destination, rows[half:], refused)


def _gone(difference: Difference) -> Iterator[Entries]:
    """The rows that the corpus lacks, in parts."""
    for rows, names in parts_of(difference.rows, difference.names):
        missing = missing_in(rows[list(NAME.names or ())].astype(NAME), names)
        yield rows[np.isin(rows["at"].astype(np.int64), missing)]


def _rows_among(destination: Destination, gone: Entries) -> Iterator[Row]:
    """Those of these rows that are still the same."""
    for block in _blocks(destination.ids(), _BLOCK):
        now = _row_entries(block, 0)[list(_KEY.names or ())].astype(_KEY)
        at = np.minimum(np.searchsorted(gone, now), len(gone) - 1)
        for row in np.flatnonzero(gone[at] == now).tolist():
            yield block[row]


def _row_entries(rows: Sequence[Row], first: int) -> Entries:
    made = np.empty(len(rows), _ROW)
    names = _entries([label for label, _ in rows], first)
    for column in NAME.names or ():
        made[column] = names[column]
    made["s0"], made["s1"] = _digests(b"" if source is None else b"source" + source for _, source in rows)
    return made


def _entries(ids: Sequence[str], first: int) -> Entries:
    made = np.empty(len(ids), NAME)
    made["d0"], made["d1"] = _digests(label.encode() for label in ids)
    made["at"] = np.arange(first, first + len(ids), dtype=np.uint64)
    return made


def _digests(words: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """16 bytes for each, as two rows of numbers."""
    found = b"".join(hashlib.blake2b(word, digest_size=16).digest() for word in words)
    return np.frombuffer(found, "<u8").reshape(-1, 2).T


def _mark(record: Record) -> bytes:
    """A digest of what a job would hold of a record."""
    label = "" if record.id is None else record.id
    return hashlib.sha256(digest_of(record) + b"%d" % len(label) + label.encode() + (record.kept or b"")).digest()


def _blocks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    each = iter(rows)
    while block := list(islice(each, size)):
        yield block
