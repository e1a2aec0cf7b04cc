"""The bytes and lines of a corpus's file, decompressed, one at a time."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from embedctl_config.errors import InputError, MissingExtra

COMPRESSIONS = (".gz", ".zst")
#: The longest line that is read (bytes), so that one line can't take the machine's memory.
MAX_LINE_BYTES = 64 * 1024 * 1024
#: The byte order mark that some editors write before UTF-8.
MARK = b"\xef\xbb\xbf"


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """A file's content, decompressed as its suffix says; standard input if the path is `-`."""
    if path == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed")
        yield sys.stdin.buffer
        return
    suffix = Path(path).suffix.lower()
    with Path(path).open("rb") as raw:
        if suffix == ".gz":
            with gzip.open(raw) as stream:
                yield cast("BinaryIO", stream)
        elif suffix == ".zst":
            pyarrow = needs_pyarrow("reading .zst")
            yield io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
        else:
            yield raw


@contextmanager
def seekable(stream: BinaryIO, *, plain: bool) -> Iterator[BinaryIO]:
    """A stream with random access, which parquet needs; unless it is a plain file, it is copied to the disk first."""
    if plain:
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        yield cast("BinaryIO", copy)


def beginning(stream: BinaryIO) -> bytes:
    """What a stream has in its buffer, once that holds something. It stays there. Empty if there is no buffer."""
    peek = getattr(stream, "peek", None)
    return bytes(peek(1)) if peek else b""


def bounded_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of a stream without a byte order mark; raises InputError for one longer than `MAX_LINE_BYTES`."""
    lines = iter(partial(stream.readline, MAX_LINE_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_BYTES:
            raise InputError(f"{name}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MiB")
        plain = line.removeprefix(MARK) if number == 1 else line
        if plain:
            yield plain


def needs_pyarrow(needed_for: str) -> Any:
    """The package pyarrow; raises MissingExtra if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("parquet", needed_for) from error
    return pyarrow
