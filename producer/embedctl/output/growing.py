"""A parquet file that goes on where its writer died.

Readers of a parquet file need the footer at its end. So each row group is written with a footer of its own, which also
says where the one before it ends. The last footer, which readers find, joins them all; they are then a few kB in
between that nobody reads.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from embedctl.output.parts import cut_back
from embedctl.output.row_groups import Layout
from embedctl.results import ChunkVectors

#: A row group ends with the chunk that fills one of these; until then, its rows are in memory.
ROWS, BYTES = 50_000, 64 * 1024 * 1024
#: The entry of a row group's own footer: JSON with what a later process has to know.
_ENTRY = "embedctl.group"
_BEFORE = "before"
_MAGIC = b"PAR1"


class GrowingFile:
    """Gathers chunks to row groups, and adds these to the end of a file.

    Attributes:
        size: bytes up to the end of the last row group, with its footer; 0 if there is none.

    Args:
        path: the file. Without `ends`, it must not exist.
        ends: where the row groups end that the file has already, from :func:`cut_to`.
    """

    def __init__(self, path: Path, layout: Layout, ends: list[int] | None = None) -> None:
        self._layout = layout
        self._tables: list[Any] = []
        self._rows = self._bytes = 0
        self._path = path
        self._ends = list(ends or ())
        self._closed = False
        self._more: dict[str, str] = {}

    @property
    def size(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def is_whole(self) -> bool:
        """Whether all chunks given are in row groups of the file."""
        return not self._tables

    def add(self, chunk: ChunkVectors) -> None:
        """Add a chunk. It is in the file once its row group is full, or the file is closed."""
        table = self._layout.table(chunk)
        self._tables.append(table)
        self._rows += table.num_rows
        self._bytes += table.nbytes
        if self._rows >= ROWS or self._bytes >= BYTES:
            self._flush()

    def sync(self) -> None:
        """Sync the row groups to the disk."""
        with self._path.open("rb") as stream:
            os.fsync(stream.fileno())

    def describe(self, name: str, text: str) -> None:
        """Add an entry to the footer of the whole file."""
        self._more[name] = text

    def close(self) -> None:
        """Write what is left, and the footer of the whole file; it is not synced. A second call does nothing."""
        if self._closed:
            return
        self._flush()
        joined = _without_rows(self._layout, self._more)
        if self._ends:
            with self._path.open("rb") as stream:
                for end in self._ends:
                    joined.append_row_groups(_footer(stream, end))
        with _at_the_end(self._path) as sink:
            joined.write_metadata_file(sink)
        self._closed = True

    def _flush(self) -> None:
        if self._tables:
            self._write(pa.concat_tables(self._tables))
        self._tables, self._rows, self._bytes = [], 0, 0

    def _write(self, table: Any) -> None:
        facts = {_BEFORE: self.size, **self._layout.facts()}
        with _at_the_end(self._path) as sink:
            writer = self._layout.writer(sink)
            try:
                writer.write_table(table, row_group_size=table.num_rows)
                writer.add_key_value_metadata({_ENTRY: json.dumps(facts)})
                writer.close()
            finally:
                writer.is_open = False  # otherwise it tries to write once more when it is freed
        self._ends.append(self._path.stat().st_size)


def cut_to(path: Path, size: int) -> tuple[list[int], dict[str, Any]]:
    """Cut a file that died back to its row groups; returns where these end, and :meth:`Layout.facts` of the last one.

    Args:
        size: the size of a :class:`GrowingFile` that was synced.

    Raises:
        ValueError: these are not its row groups any more.
        OSError: it can't be read or cut.
    """
    os.close(cut_back(path, size))
    ends: list[int] = []
    last: dict[str, Any] = {}
    with path.open("rb") as stream:
        end = size
        while end:
            try:
                facts = json.loads(_footer(stream, end).metadata[_ENTRY.encode()])
            except (KeyError, TypeError, OSError, pa.ArrowException) as error:
                raise ValueError(f"{path} has no row group that ends at byte {end}") from error
            ends.append(end)
            end = _earlier(facts.pop(_BEFORE), end)
            last = last or facts
    if not last:
        raise ValueError(f"{path} has no row group")
    return ends[::-1], last


def _earlier(end: int, than: int) -> int:
    if not 0 <= end < than:
        raise ValueError(f"a row group that ends at byte {than} can't follow one that ends at byte {end}")
    return end


def _footer(stream: IO[bytes], end: int) -> Any:
    """The footer that ends at this byte.

    Raises:
        ValueError, OSError: there is none.
    """
    stream.seek(max(0, end - 8))
    tail = stream.read(8)
    if len(tail) < 8 or tail[4:] != _MAGIC:
        raise ValueError(f"no footer of parquet ends at byte {end}")
    size = struct.unpack("<I", tail[:4])[0] + 8
    stream.seek(max(0, end - size))
    return pq.read_metadata(pa.BufferReader(stream.read(size)))


def _without_rows(layout: Layout, more: Mapping[str, str]) -> Any:
    """The footer of a file without rows, with these entries too."""
    sink = pa.BufferOutputStream()
    with layout.writer(sink) as writer:
        writer.add_key_value_metadata({**layout.metadata, **more})
    return pq.read_metadata(pa.BufferReader(sink.getvalue()))


@contextmanager
def _at_the_end(path: Path) -> Iterator[Any]:
    """A stream of pyarrow that appends to a file.

    pyarrow takes offsets from the stream's position, and refuses one that does not begin at 0. This one seems to, until
    the first write goes to the end of the file (`O_APPEND`).
    """
    with pa.OSFile(os.fsencode(path), "ab") as sink:
        os.lseek(_descriptor_of(path), 0, os.SEEK_SET)
        yield sink


def _descriptor_of(path: Path) -> int:
    """The descriptor with which this process appends to a file. Older versions of pyarrow do not tell it."""
    file = path.stat()
    for name in (each.name for each in Path("/dev/fd").iterdir()):
        with suppress(OSError):  # the listing has a descriptor of its own, which is closed by now
            found = os.fstat(int(name))
            appends = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_APPEND
            if appends and (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino):
                return int(name)
    raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(path))
