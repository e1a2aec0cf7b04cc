"""An earlier output in a parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import DIGEST_BYTES, NO_DIGEST, Digests, as_rows
from embedctl.corpus.kept import TEXT_SHA256
from embedctl.destinations.interface import ABOUT, Contract
from embedctl.destinations.numbers import FLOAT32, Numbers
from embedctl.destinations.parquet import FACTS, pa, pq
from embedctl.destinations.vector_columns import EMBEDDING, dense_in, multi_in, other_vectors, sparse_in
from embedctl.sync.known import Earlier, Rows, check_numbers, no_digests, scratch
from embedctl_config.errors import OutputError
from embedctl_config.outputs import Output

#: Rows whose digests are read together.
_ROWS = 8192
#: A row group is read in slices of about so many bytes, and so many slices are held: those of one of our row groups.
_SLICE, _HELD = 16 * 1024 * 1024, 5
#: Bytes of a column that are read at once; otherwise, it would be all of them in a row group.
_BUFFER = 1024 * 1024
#: Once each row group has been read so often, as the corpus has quite another order, the vectors of all are brought
#: into a file where each is found at once.
_READS = 3
#: Bytes of a row's digest and numbers of tokens, and of how many numbers its vectors of two other kinds have.
_PER_ROW = DIGEST_BYTES + 2 * 4 + 2 * 8


class ParquetEarlier(Earlier):
    """A parquet file that :class:`ParquetWriter` wrote. It stays open, because its name is that of the new output."""

    def __init__(self, path: Path, numbers: Numbers | None) -> None:
        self.name, self._folder = str(path), path.absolute().parent
        try:
            self._file = pq.ParquetFile(
                pa.OSFile(self.name), pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error
        entries = self._file.metadata.metadata or {}
        schema = self._file.schema_arrow
        column = schema.field(TEXT_SHA256) if TEXT_SHA256 in schema.names else None
        if ABOUT.encode() not in entries or column is None or column.type != pa.binary(32):
            raise no_digests(self.name)
        self.about = Contract.in_file(entries[ABOUT.encode()], self.name)
        facts = entries.get(FACTS.encode())
        self._numbers = Numbers.of_facts(json.loads(facts)) if facts else FLOAT32
        check_numbers(self.name, self._numbers, numbers)
        self._dim = schema.field(EMBEDDING).type.list_size if EMBEDDING in schema.names else 0
        self._others = others = other_vectors(schema)
        self._columns = [*([EMBEDDING] if self._dim else []), *others, "tokens_used", "tokens_lost", TEXT_SHA256]
        self.widths = {Output.DENSE: self._dim} if self._dim else {}
        self.widths |= {Output(name): width for name, width in others.items()}
        self._groups = [self._file.metadata.row_group(group) for group in range(self._file.num_row_groups)]
        self.rows = sum(group.num_rows for group in self._groups)
        #: How many rows of each row group are a slice; of each slice, its row group and its first row.
        sizes = [(each.num_rows, max(each.total_byte_size, _SLICE)) for each in self._groups]
        self._slice_rows = [max(1, rows * _SLICE // size) for rows, size in sizes]
        slices, first = list[tuple[int, int]](), 0
        for group, (rows, _) in enumerate(sizes):
            slices += ((group, at) for at in range(first, first + rows, self._slice_rows[group]))
            first += rows
        self._group_of, self._starts = np.array(slices, np.int64).reshape(-1, 2).T
        self._held: dict[int, Rows] = {}
        #: The slices that follow the last one that was read, in its row group.
        self._coming: Iterator[tuple[int, Rows]] = iter(())
        self._last, self._reads = len(slices), 0
        self._all: list[Rows] = []

    def digests(self) -> Iterator[Digests]:
        for group in range(len(self._groups)):
            try:
                # One row group at a time: a reader of all of them keeps what it has read.
                columns = ["error_code", TEXT_SHA256]
                for batch in self._file.iter_batches(_ROWS, [group], columns=columns, use_threads=False):
                    # As lists: what computes with columns is imported with 50 MB of memory.
                    codes, digests = (batch.column(name).to_pylist() for name in columns)
                    usable = (digest if code is None else None for code, digest in zip(codes, digests, strict=True))
                    yield as_rows(b"".join(digest or NO_DIGEST for digest in usable))
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(error) from error

    def rows_at(self, places: npt.NDArray[np.int64]) -> Rows:
        if not self._all and self._reads > _READS * len(self._groups):
            self._bring_all()
        rows_of = self._all.__getitem__ if self._all else self._slice
        slices = np.searchsorted(self._starts, places, side="right") - 1
        parts = []
        for number in np.unique(slices).tolist():  # in the order in which a row group gives them
            at = np.flatnonzero(slices == number)
            parts.append((rows_of(number).select(places[at] - self._starts[number]), at.tolist()))
        return Rows.joined(parts)

    def _slice(self, number: int) -> Rows:
        """The rows of a slice. Those before it in its row group have to be read first, and are held, too."""
        if number not in self._held:
            group = self._group_of[number]
            if self._last >= number or self._group_of[self._last] != group:
                self._coming = self._read(int(group))
            while number not in self._held:
                self._last, rows = next(self._coming)
                self._held[self._last] = rows
                if len(self._held) > _HELD:
                    del self._held[next(iter(self._held))]
        self._held[number] = self._held.pop(number)  # the first one is that which was not used for the longest time
        return self._held[number]

    def _bring_all(self) -> None:
        size = self.rows * (_PER_ROW + 4 * self._dim)
        for group in self._groups:
            columns = map(group.column, range(group.num_columns))
            size += sum(4 * each.num_values for each in columns if each.path_in_schema.split(".")[0] in self._others)
        try:
            room = scratch(size, np.dtype(np.uint8), self._folder)
        except OSError as error:
            raise OutputError(
                f"{self._folder} has no room for the vectors of {self.name}, whose order is another one: "
                f"{error.strerror or error}. Make room there, or choose another folder for the output"
            ) from error
        used = 0

        def brought(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            nonlocal used
            there = room[used : used + array.nbytes].view(array.dtype).reshape(array.shape)
            there[...], used = array, used + array.nbytes
            return there

        self._held.clear()
        self._coming = iter(())
        for group in range(len(self._groups)):
            self._all += (rows.with_arrays(brought) for _, rows in self._read(group))

    def _read(self, group: int) -> Iterator[tuple[int, Rows]]:
        """The slices of a row group, by their numbers."""
        self._reads += 1
        first, rows = int(np.searchsorted(self._group_of, group)), self._slice_rows[group]
        try:
            batches = self._file.iter_batches(rows, [group], columns=self._columns, use_threads=False)
            for number, batch in enumerate(batches, first):
                yield number, self._rows_of(pa.Table.from_batches([batch]))
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    def _rows_of(self, table: Any) -> Rows:
        digests, used, lost = (table.column(name).to_pylist() for name in (TEXT_SHA256, "tokens_used", "tokens_lost"))
        return Rows(
            as_rows(b"".join(digest or NO_DIGEST for digest in digests)),
            np.array([(each or 0, other or 0) for each, other in zip(used, lost, strict=True)], np.uint32),
            dense_in(table, self._numbers, self._dim),
            sparse_in(table),
            multi_in(table),
        )

    def _damaged(self, error: Exception) -> OutputError:
        return OutputError(f"{self.name} can't be read: {error}. Restore it, or remove it to encode everything")
