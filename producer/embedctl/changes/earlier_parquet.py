"""An earlier output in a parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from embedctl.changes.earlier import Earlier, EarlierRows, Rows, check_numbers, no_digests
from embedctl.changes.spool import Copied, Cut, Spool
from embedctl.destinations.about import ABOUT, About
from embedctl.destinations.numbers import FLOAT32, Numbers
from embedctl.digests import DIGEST_BYTES, NO_DIGEST, as_rows
from embedctl.kept import TEXT_SHA256
from embedctl_config.errors import MissingExtra, OutputError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from embedctl.destinations.parquet import FACTS, vectors_in
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error

#: Rows whose digests are read together.
_ROWS = 8192
#: Rows whose row groups are looked at together.
_SLICE = 1_000_000
#: Row groups whose vectors are held: one is some 64 MB.
_HELD = 2
#: If the rows are wanted in an order that jumps between row groups more often than this for each group, they are first
#: brought into a file where each is found at once.
_JUMPS = 4
_DIGESTS = ["id", "error_code", TEXT_SHA256]
_VECTORS = ("embedding", "tokens_used", "tokens_lost", TEXT_SHA256)


class ParquetEarlier(Earlier):
    """A parquet file that :class:`ParquetWriter` wrote. It stays open, because its name is that of the new output."""

    def __init__(self, path: Path, numbers: Numbers | None) -> None:
        self.name = str(path)
        try:
            self._file = pq.ParquetFile(pa.OSFile(self.name), page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error
        entries = self._file.metadata.metadata or {}
        schema = self._file.schema_arrow
        column = schema.field(TEXT_SHA256) if TEXT_SHA256 in schema.names else None
        if ABOUT.encode() not in entries or column is None or column.type != pa.binary(32):
            raise no_digests(self.name)
        self.about = About.parse(entries[ABOUT.encode()], self.name)
        facts = entries.get(FACTS.encode())
        self._numbers = Numbers.of_facts(json.loads(facts)) if facts else FLOAT32
        check_numbers(self.name, self._numbers, numbers)
        self.dim = schema.field("embedding").type.list_size
        sizes = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self.rows = int(self._starts[-1])
        self._held: dict[int, Copied] = {}
        self._spool: Spool | None = None

    def read(self) -> Iterator[EarlierRows]:
        for group in range(len(self._starts) - 1):
            try:
                # One row group at a time: a reader of all of them keeps what it has read.
                for batch in self._file.iter_batches(_ROWS, [group], columns=_DIGESTS, use_threads=False):
                    # As lists: what computes with columns is imported with 50 MB of memory.
                    ids, codes, digests = (batch.column(name).to_pylist() for name in _DIGESTS)
                    usable = [code is None and digest is not None for code, digest in zip(codes, digests, strict=True)]
                    each = b"".join(digest or NO_DIGEST for digest in digests)
                    yield EarlierRows(as_rows(each), ids, np.array(usable, bool))
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(error) from error

    def take(self, rows: Rows) -> Copied:
        if self._spool is not None:
            return self._spool.take(rows)
        vectors = np.empty((len(rows), self.dim), np.float32)
        cuts: list[Cut] = [(0, 0)] * len(rows)
        digests = np.zeros((len(rows), DIGEST_BYTES), np.uint8)
        groups = self._group_of(rows)
        for group in dict.fromkeys(groups.tolist()):
            found = self._group(group)
            chosen = np.flatnonzero(groups == group)
            at = rows[chosen] - self._starts[group]
            vectors[chosen], digests[chosen] = found.vectors[at], found.digests[at]
            for where, row in zip(chosen.tolist(), at.tolist(), strict=True):
                cuts[where] = found.cuts[row]
        return Copied(vectors, cuts, digests)

    def prepare(self, rows: Rows, scratch: Path) -> None:
        jumps, wanted = 0, np.zeros(len(self._starts) - 1, bool)
        for first in range(0, len(rows), _SLICE):
            some = rows[first : first + _SLICE]
            groups = self._group_of(some[some >= 0])
            jumps += int(np.count_nonzero(np.diff(groups)))
            wanted[groups] = True
        if jumps <= _JUMPS * len(wanted):
            return
        try:
            spool = Spool(self.dim, scratch)
            for group in np.flatnonzero(wanted).tolist():
                spool.write(int(self._starts[group]), self._group(group))
        except OSError as error:
            raise OutputError(
                f"{scratch} has no room for the vectors of {self.name}, whose order is another one: "
                f"{error.strerror or error}. Make room there, or choose another folder for the output"
            ) from error
        self._spool = spool
        self._held = {}

    def _group_of(self, rows: Rows) -> Rows:
        return np.searchsorted(self._starts, rows, side="right").astype(np.int64) - 1

    def _group(self, number: int) -> Copied:
        if number not in self._held:
            while len(self._held) >= _HELD:
                del self._held[next(iter(self._held))]
            try:
                table = self._file.read_row_group(number, columns=list(_VECTORS))
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(error) from error
            each = b"".join(digest or NO_DIGEST for digest in table.column(TEXT_SHA256).to_pylist())
            self._held[number] = Copied(vectors_in(table, self._numbers, self.dim), _cuts(table), as_rows(each))
        found = self._held.pop(number)  # the one that was used last is the last one
        self._held[number] = found
        return found

    def _damaged(self, error: Exception) -> OutputError:
        return OutputError(f"{self.name} can't be read: {error}. Restore it, or give --force to encode everything")


def _cuts(table: Any) -> list[Cut]:
    used, lost = (table.column(name).to_pylist() for name in _VECTORS[1:3])
    return [(0, 0) if each is None else (each, other) for each, other in zip(used, lost, strict=True)]
