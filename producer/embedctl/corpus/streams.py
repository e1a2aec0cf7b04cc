"""The bytes and lines of a corpus's file, decompressed, one at a time."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from embedctl.corpus.dialect import Dialect
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
#: What is neither UTF-8 nor in another encoding has at most this share of control characters (of the bytes).
_MOST_CONTROLS = 0.02
#: In UTF-16 and UTF-32 without a mark, every other byte of most scripts is a control character: of a text in UTF-8, no
#: more than this share of the bytes are control characters at odd places beyond those at even ones, or the reverse.
_MOST_UNEVEN = 0.1
#: Control characters that texts don't hold, and all of them.
_CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\x1a"})
_ALL_CONTROLS = bytes(range(32))
_LINE_END = re.compile("\r\n?|\n")
#: The end mark that old DOS tools write, once or up to the end of a block.
DOS_END = "\x1a"
#: A line that begins so was written in another encoding than the lines before it, which was joined with them.
_MARKS_WITHIN = (b"\xff\xfe", b"\xfe\xff", "\ufffe".encode())
_LEAST_OF_MARKS = MARK[0]
#: What is said of a block of NULs, which is what a crash leaves of a file that was being written.
NULS = "NUL bytes alone, as a write that was interrupted leaves them"


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
    def of(cls, head: bytes, said: Dialect, *, table: bool) -> Writing:
        """What a file's beginning tells of what was not said. In a table, a line feed may stand in quotes."""
        encoding = said.encoding or _encoding_of(head)
        if said.carriage is not None:
            return cls(encoding, said.carriage)
        # The line feed after the last carriage return may not be here yet; and it may be the only one.
        text = head.decode(encoding, "replace").rstrip("\r\n")
        first = _LINE_END.search(text)
        return cls(encoding, first is not None and first[0] == "\r" and (table or "\n" not in text))

    def utf_8(self, head: bytes) -> bytes:
        """A text's beginning as UTF-8 without a mark, with a line feed at each line's end."""
        if self == Writing():
            return head.removeprefix(MARK)
        text = head.decode(self.encoding, "replace").removeprefix("\ufeff")
        return (text.replace("\r", "\n") if self.carriage else text).encode()

    def without(self, said: Dialect) -> Writing:
        """This without what somebody said."""
        return Writing("utf-8" if said.encoding else self.encoding, self.carriage and said.carriage is None)

    def __str__(self) -> str:
        said = [self.encoding.upper()] if self.encoding != "utf-8" else []
        return ", ".join([*said, "carriage returns at the line ends"] if self.carriage else said)


def _encoding_of(head: bytes) -> str:
    return next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), "utf-8")


def looks_binary(head: bytes) -> bool:
    """Whether a file's beginning is neither UTF-8 nor a text in an encoding of one byte for each character."""
    controls = _count(head, _CONTROLS)
    if controls and abs(_count(head[::2], _ALL_CONTROLS) - _count(head[1::2], _ALL_CONTROLS)) > _MOST_UNEVEN * len(
        head
    ):
        return True
    return controls > _MOST_CONTROLS * len(head) and not _is_utf_8(head)


def _is_utf_8(head: bytes) -> bool:
    """Whether this is UTF-8, which may end within a character."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _count(data: bytes, some: bytes) -> int:
    return len(data) - len(data.translate(None, some))


def as_utf_8(stream: BinaryIO, writing: Writing, name: str) -> BinaryIO:
    """A text as UTF-8 with a line feed at each line's end, whatever encoding and line ends it has; raises InputError
    while it is read, if it can't have this encoding. Only text that is neither is copied."""
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
        if line[0] >= _LEAST_OF_MARKS:
            while line.startswith(MARK):
                line = line.removeprefix(MARK)
            if line.startswith(_MARKS_WITHIN):
                raise InputError(
                    f"{name}, line {number}: a byte order mark of another encoding begins it: files were joined"
                )
        if not line.endswith(b"\n"):  # the last one
            line = line.rstrip(DOS_END.encode())
        if line:
            yield line


def needs_pyarrow(needed_for: str) -> Any:
    """The package pyarrow; raises MissingExtra if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("parquet", needed_for) from error
    return pyarrow
