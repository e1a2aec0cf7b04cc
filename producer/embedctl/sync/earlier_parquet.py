"""An earlier output in a parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import NO_DIGEST, Digests, as_rows
from embedctl.corpus.kept import TEXT_SHA256
from embedctl.destinations.interface import ABOUT, Contract
from embedctl.destinations.numbers import FLOAT32, Numbers
from embedctl.destinations.parquet import FACTS, pa, pq
from embedctl.destinations.vector_columns import dense_in
from embedctl.sync.known import Earlier, Rows, check_numbers, no_digests, row_type, scratch
from embedctl_config.errors import OutputError

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
        self.dim = schema.field("embedding").type.list_size
        self._groups = self._file.num_row_groups
        sizes = [self._file.metadata.row_group(group).num_rows for group in range(self._groups)]
        self._starts = np.cumsum([0, *sizes])
        self.rows = int(self._starts[-1])
        self._group = lru_cache(_HELD)(self._read)
        self._reads = 0
        self._all: Rows | None = None

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
        if self._all is None and self._reads > _READS * self._groups:
            self._bring_all()
        if self._all is not None:
            return np.array(self._all[places])
        rows = np.empty(len(places), row_type(self.dim))
        groups = np.searchsorted(self._starts, places, side="right") - 1
        for group in dict.fromkeys(groups.tolist()):
            rows[groups == group] = self._group(group)[places[groups == group] - self._starts[group]]
        return rows

    def _bring_all(self) -> None:
        try:
            every = scratch(self.rows, row_type(self.dim), self._folder)
        except OSError as error:
            raise OutputError(
                f"{self._folder} has no room for the vectors of {self.name}, whose order is another one: "
                f"{error.strerror or error}. Make room there, or choose another folder for the output"
            ) from error
        for group in range(self._groups):
            every[self._starts[group] : self._starts[group + 1]] = self._group(group)
        self._all = every
        self._group.cache_clear()

    def _read(self, number: int) -> Rows:
        self._reads += 1
        try:
            columns = ["embedding", "tokens_used", "tokens_lost", TEXT_SHA256]
            table = self._file.read_row_group(number, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error
        rows = np.empty(len(table), row_type(self.dim))
        rows["vector"] = dense_in(table, self._numbers, self.dim)
        rows["digest"] = as_rows(b"".join(digest or NO_DIGEST for digest in table.column(TEXT_SHA256).to_pylist()))
        used, lost = (table.column(name).to_pylist() for name in columns[1:3])
        rows["cut"] = [(each or 0, other or 0) for each, other in zip(used, lost, strict=True)]
        return rows

    def _damaged(self, error: Exception) -> OutputError:
        return OutputError(f"{self.name} can't be read: {error}. Restore it, or remove it to encode everything")
