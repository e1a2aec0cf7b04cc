"""The bytes and lines of a corpus's file, decompressed, one at a time."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from embedctl_config.errors import InputError, MissingExtra

_OPENERS: Mapping[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSIONS = (*_OPENERS, ".zst")
#: The longest line that is read (bytes), so that one line can't take the machine's memory.
MAX_LINE_BYTES = 64 * 1024 * 1024
#: The byte order mark that some editors write before UTF-8.
MARK = b"\xef\xbb\xbf"
#: Byte order marks → the encoding. That of UTF-32 begins with that of UTF-16.
_MARKS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
#: This much of a file's beginning tells its encoding and its line ends (bytes).
_HEAD_BYTES = 64 * 1024
#: Of UTF-16 without a mark, at least every tenth byte is NUL, and nearly always the same one of two: line ends, spaces
#: and the names of fields are ASCII in any language. Of UTF-32, it is one of two twice as often as the other.
_LEAST_NULS = 0.1
_ONE_OF_TWO = 4
#: The end mark that old DOS tools write.
_DOS_END = b"\x1a"


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """A file's content, decompressed as its suffix says; standard input if the path is `-`."""
    if path == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed")
        yield sys.stdin.buffer
        return
    suffix = Path(path).suffix.lower()
    with Path(path).open("rb", buffering=_HEAD_BYTES) as raw:
        if opener := _OPENERS.get(suffix):
            with opener(raw) as stream:
                yield io.BufferedReader(stream, _HEAD_BYTES)
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


@dataclass(frozen=True, slots=True)
class Writing:
    """The encoding of a text, and whether a carriage return alone ends its lines, as on old Macs."""

    encoding: str = "utf-8"
    carriage: bool = False

    @classmethod
    def of(cls, head: bytes, encoding: str | None) -> Writing:
        """What a file's beginning tells; the encoding may be known."""
        encoding = encoding or _encoding_of(head)
        # The line feed after the last carriage return may not be here yet; and it may be the only one.
        text = head.decode(encoding, "replace").rstrip("\r\n")
        return cls(encoding, "\r" in text and "\n" not in text)

    def utf_8(self, head: bytes) -> bytes:
        """A text's beginning as UTF-8 without a mark, with a line feed at each line's end."""
        if self == Writing():
            return head.removeprefix(MARK)
        text = head.decode(self.encoding, "replace").removeprefix("\ufeff")
        return (text.replace("\r", "\n") if self.carriage else text).encode()

    def __str__(self) -> str:
        said = [self.encoding.upper()] if self.encoding != "utf-8" else []
        return ", ".join([*said, "carriage returns at the line ends"] if self.carriage else said)


def _encoding_of(head: bytes) -> str:
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) > max(1, _ONE_OF_TWO * min(even, odd)) and even + odd >= _LEAST_NULS * len(head):
        return "utf-16-le" if odd > even else "utf-16-be"
    return "utf-8"


def as_utf_8(stream: BinaryIO, encoding: str | None, name: str) -> BinaryIO:
    """A text as UTF-8 with a line feed at each line's end, whatever encoding and line ends it has; raises InputError
    while it is read, if it can't have this encoding. Only text that is neither is copied."""
    writing = Writing.of(beginning(stream), encoding)
    return stream if writing == Writing() else io.BufferedReader(_Recoded(stream, writing, name), _HEAD_BYTES)


class _Recoded(io.RawIOBase):
    def __init__(self, stream: BinaryIO, writing: Writing, name: str) -> None:
        self._stream = stream
        self._carriage = writing.carriage
        self._name = name
        # Of what is no character, the record alone is bad.
        self._errors = "surrogatepass" if writing.encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"
        self._decoder = codecs.getincrementaldecoder(writing.encoding)(self._errors)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        over = False
        while not self._rest and not over:
            data = self._stream.read(_HEAD_BYTES)
            over = not data
            try:
                text = self._decoder.decode(data, over)
            except UnicodeDecodeError as error:
                raise InputError(f"{self._name} is not {error.encoding.upper()}: {error.reason}") from None
            self._rest = (text.replace("\r", "\n") if self._carriage else text).encode("utf-8", self._errors)
        taken = min(len(buffer), len(self._rest))
        buffer[:taken], self._rest = self._rest[:taken], self._rest[taken:]
        return taken


def bounded_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of a stream without a byte order mark and an end mark; raises InputError for one longer than
    `MAX_LINE_BYTES`."""
    lines = iter(partial(stream.readline, MAX_LINE_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_BYTES:
            raise InputError(f"{name}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MiB")
        plain = line.removeprefix(MARK) if number == 1 else line
        plain = plain.removesuffix(_DOS_END)  # any line but the last ends in a line feed
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
