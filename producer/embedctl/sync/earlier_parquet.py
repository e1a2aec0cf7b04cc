"""An earlier output in a parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import NO_DIGEST, Digests, as_rows
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
#: Row groups whose vectors are held: one is some 64 MB.
_HELD = 2
#: Once each row group has been read so often, as the corpus has quite another order, the vectors of all are brought
#: into a file where each is found at once.
_READS = 3


class ParquetEarlier(Earlier):
    """A parquet file that :class:`ParquetWriter` wrote. It stays open, because its name is that of the new output."""

    def __init__(self, path: Path, numbers: Numbers | None) -> None:
        self.name, self._folder = str(path), path.absolute().parent
        try:
            self._file = pq.ParquetFile(pa.OSFile(self.name), page_checksum_verification=True)
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
        others = other_vectors(schema)
        self._columns = [*([EMBEDDING] if self._dim else []), *others, "tokens_used", "tokens_lost", TEXT_SHA256]
        self.widths = {Output.DENSE: self._dim} if self._dim else {}
        self.widths |= {Output(name): width for name, width in others.items()}
        self._groups = self._file.num_row_groups
        sizes = [self._file.metadata.row_group(group).num_rows for group in range(self._groups)]
        self._starts = np.cumsum([0, *sizes])
        self.rows = int(self._starts[-1])
        self._group = lru_cache(_HELD)(self._read)
        self._reads = 0
        self._sizes: dict[int, int] = {}
        self._all: list[Rows] = []

    def digests(self) -> Iterator[Digests]:
        for group in range(self._groups):
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
        if not self._all and self._reads > _READS * self._groups:
            self._bring_all()
        rows_of = self._all.__getitem__ if self._all else self._group
        groups = np.searchsorted(self._starts, places, side="right") - 1
        parts = []
        for group in dict.fromkeys(groups.tolist()):
            at = np.flatnonzero(groups == group)
            parts.append((rows_of(group).select(places[at] - self._starts[group]), at.tolist()))
        return Rows.joined(parts)

    def _bring_all(self) -> None:
        size = sum(self._sizes.get(group) or self._group(group).nbytes for group in range(self._groups))
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

        self._all = [self._group(group).with_arrays(brought) for group in range(self._groups)]
        self._group.cache_clear()

    def _read(self, number: int) -> Rows:
        self._reads += 1
        try:
            table = self._file.read_row_group(number, columns=self._columns)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error
        digests, used, lost = (table.column(name).to_pylist() for name in (TEXT_SHA256, "tokens_used", "tokens_lost"))
        rows = Rows(
            as_rows(b"".join(digest or NO_DIGEST for digest in digests)),
            np.array([(each or 0, other or 0) for each, other in zip(used, lost, strict=True)], np.uint32),
            dense_in(table, self._numbers, self._dim),
            sparse_in(table),
            multi_in(table),
        )
        self._sizes[number] = rows.nbytes
        return rows

    def _damaged(self, error: Exception) -> OutputError:
        return OutputError(f"{self.name} can't be read: {error}. Restore it, or remove it to encode everything")
