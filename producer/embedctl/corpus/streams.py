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

_OPENERS: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".bz2": lambda raw: _Unpacked(raw, bz2.BZ2Decompressor),
    ".xz": lambda raw: _Unpacked(raw, lzma.LZMADecompressor),
}
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
#: and the names of fields are ASCII in any language, unless its lines are of one script without spaces.
_LEAST_NULS = 0.1
_ONE_OF_TWO = 4
#: No script has characters beyond this plane, whose number is the second highest byte of UTF-32; the highest is 0.
_LAST_PLANE = 3
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


class _Unpacked(io.RawIOBase):
    """One compressed stream after the other. Python's own readers end without a word before what is no such stream, and
    so before all that follows it."""

    def __init__(self, packed: BinaryIO, make: Callable[[], Any]) -> None:
        self._packed, self._make = packed, make
        self._stream: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            if self._stream is None or self._stream.eof:
                if not (rest := self._rest()):
                    return 0
                self._stream = self._make()
            else:
                rest = self._packed.read(_HEAD_BYTES) if self._stream.needs_input else b""
                if not rest and self._stream.needs_input:
                    raise EOFError("it ends within a compressed stream")
            try:
                data = self._stream.decompress(rest, len(buffer))
            except lzma.LZMAError as error:
                raise OSError(str(error)) from None
        buffer[: len(data)] = data
        return len(data)

    def _rest(self) -> bytes:
        """What follows a stream, without the zeros that may fill up an .xz."""
        rest: bytes = self._stream.unused_data if self._stream else b""
        while not (rest := rest.lstrip(b"\0")):
            if not (rest := self._packed.read(_HEAD_BYTES)):
                return b""
        return rest


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
    if len(head) >= 8 and len(units := head[: len(head) & ~3]):
        if not any(units[3::4]) and max(units[2::4]) <= _LAST_PLANE:
            return "utf-32-le"
        if not any(units[::4]) and max(units[1::4]) <= _LAST_PLANE:
            return "utf-32-be"
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) > max(1, _ONE_OF_TWO * min(even, odd)) and even + odd >= _LEAST_NULS * len(head):
        return "utf-16-le" if odd > even else "utf-16-be"
    if (even > 0) is not (odd > 0) and not _is_whole(head, "utf-8"):
        wide = "utf-16-le" if odd else "utf-16-be"
        return wide if _is_whole(head, wide) and "\n" in head.decode(wide, "ignore") else "utf-8"
    return "utf-8"


def _is_whole(head: bytes, encoding: str) -> bool:
    """Whether a file's beginning has this encoding; it may end within a character."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return True


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
    """The lines of a stream without byte order marks, which files that were joined have in the middle, and without an
    end mark; raises InputError for one longer than
    `MAX_LINE_BYTES`."""
    lines = iter(partial(stream.readline, MAX_LINE_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_BYTES:
            raise InputError(f"{name}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MiB")
        plain = line.removeprefix(MARK).removesuffix(_DOS_END)  # any line but the last ends in a line feed
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
