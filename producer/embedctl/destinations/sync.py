"""Compares a corpus with a destination, by the destination's rows alone, and deletes what is gone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from embedctl.destinations.interface import Contract, Destination, Row
from embedctl.destinations.writing import tried
from embedctl.digests import digest_of
from embedctl.records import Record
from embedctl.runs import NAME, Entries, Runs, missing_in, parts_of
from embedctl_config.errors import InputError, OutputError

#: Ids in memory; more of them go to the disk.
_HELD = 2**17
_COST = "comparing the ids of the corpus with those of the destination takes up to 48 bytes for each"
#: Rows that are compared or deleted together.
_BLOCK, _DELETED = 10_000, 1_000


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
    """What of a corpus a destination lacks, and which ids the corpus has. A context manager.

    Attributes:
        lacking: one for each record of the corpus, whether the destination lacks it.
        digest: over all records of the corpus.
        names: the ids of the corpus.
    """

    lacking: npt.NDArray[np.bool_]
    digest: bytes
    names: Runs = field(repr=False)

    def __enter__(self) -> Difference:
        return self

    def __exit__(self, *error: object) -> None:
        self.names.__exit__(*error)

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


def compare(destination: Destination, contract: Contract, records: Iterator[Record]) -> Difference:
    """Compare a corpus, read once, with the rows of a destination. It is opened, unless it is not there.

    Raises:
        OtherContract, DestinationUnavailable, OutputError: as the destination says.
        InputError: the corpus can't be read, a record has no id, or there is no room for temporary files.
    """
    holds_rows = tried(destination, lambda: destination.open(contract))
    names, digest, lacking = Runs(NAME, _HELD, _COST), hashlib.sha256(), [np.empty(0, bool)]
    count = 0
    while block := list(islice(records, min(_BLOCK, destination.batch_records))):
        ids = [str(record.id) for record in block]
        found = tried(destination, lambda ids=ids: destination.sources(ids)) if holds_rows else {}  # type: ignore[misc]  # bound in each round
        wanted = (contract.source(digest_of(record)) for record in block)
        lacking.append(np.array([found.get(label) != source for label, source in zip(ids, wanted, strict=True)], bool))
        for record in block:
            digest.update(_mark(record))
        names.add(_entries(ids, count))
        count += len(block)
    return Difference(np.concatenate(lacking), digest.digest(), names)


def delete_missing(destination: Destination, difference: Difference, limit: Limit) -> int:
    """Delete the rows of an open destination whose ids a corpus lacks; returns how many.

    A row that changes meanwhile stays.

    Raises:
        OutputError: there are more than the limit allows; nothing is deleted. Or as the destination says.
        InputError: there is no room for temporary files.
    """
    gone, rows = _gone(destination, difference)
    if len(gone) > (most := limit.of(rows)):
        raise OutputError(
            f"the corpus lacks {len(gone):,} of the {rows:,} rows of {destination.name}, and at most {most:,} may be "
            "deleted: nothing is deleted. If that is right, allow it with --delete-at-most"
        )
    deleted = 0
    for block in _blocks(_rows_among(destination, gone), _DELETED):
        deleted += tried(destination, lambda block=block: destination.delete(block))  # type: ignore[misc]  # bound in each round
    return deleted


def _gone(destination: Destination, difference: Difference) -> tuple[Entries, int]:
    """The names of rows that the corpus lacks, in order, and how many rows there are."""
    rows = 0
    with Runs(NAME, _HELD, _COST) as there:
        for block in _blocks(destination.ids(), _BLOCK):
            there.add(_entries([label for label, _ in block], rows))
            rows += len(block)
        found = [
            old[np.isin(old["at"].astype(np.int64), missing_in(old, new))]
            for old, new in parts_of(there, difference.names)
        ]
    return np.sort(np.concatenate(found), order=["d0", "d1"]), rows


def _rows_among(destination: Destination, names: Entries) -> Iterator[Row]:
    """The rows with these names, as they are now."""
    if not len(names):
        return
    keys = names[["d0", "d1"]].astype(_KEY)
    for block in _blocks(destination.ids(), _BLOCK):
        own = _entries([label for label, _ in block], 0)[["d0", "d1"]].astype(_KEY)
        at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
        for row in np.flatnonzero(keys[at] == own).tolist():
            yield block[row]


_KEY = np.dtype([("d0", "<u8"), ("d1", "<u8")])


def _entries(ids: Sequence[str], first: int) -> Entries:
    made = np.empty(len(ids), NAME)
    words = b"".join(hashlib.blake2b(label.encode(), digest_size=16).digest() for label in ids)
    pairs = np.frombuffer(words, "<u8").reshape(-1, 2)
    made["d0"], made["d1"] = pairs[:, 0], pairs[:, 1]
    made["at"] = np.arange(first, first + len(ids), dtype=np.uint64)
    return made


def _mark(record: Record) -> bytes:
    """A digest of what a job would hold of a record."""
    label = "" if record.id is None else record.id
    return hashlib.sha256(digest_of(record) + b"%d" % len(label) + label.encode() + (record.kept or b"")).digest()


def _blocks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    each = iter(rows)
    while block := list(islice(each, size)):
        yield block
