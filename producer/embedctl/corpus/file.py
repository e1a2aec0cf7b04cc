"""One file of a corpus, or standard input; and what it is by its first bytes, where that contradicts its format."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from embedctl.corpus.arrays import array
from embedctl.corpus.dialect import PLAIN, Dialect
from embedctl.corpus.inputs import FORMATS
from embedctl.corpus.lines import jsonl, txt
from embedctl.corpus.rows import Line, Rows
from embedctl.corpus.streams import (
    COMPRESSIONS,
    MARK,
    Writing,
    as_utf_8,
    beginning,
    bounded_lines,
    looks_binary,
    opened,
)
from embedctl.corpus.tables import column_types, delimited, parquet
from embedctl_config.errors import InputError

_PARQUET = b"PAR1"
_ARCHIVE = "an archive: unpack it"
_AS_PARQUET = "write it as parquet"
#: How files begin → what they are, and what to do with them.
_KINDS = {
    _PARQUET: "parquet: give --format parquet",
    b"PARE": "encrypted parquet: decrypt it",
    b"\x1f\x8b": "compressed: name it .gz, or pipe it through gunzip",
    b"BZh": "compressed: name it .bz2, or pipe it through bunzip2",
    b"\xfd7zXZ\0": "compressed: name it .xz, or pipe it through unxz",
    b"\x28\xb5\x2f\xfd": "compressed: name it .zst, or pipe it through zstd -dc",
    b"\x04\x22\x4d\x18": "compressed: pipe it through lz4 -dc",
    b"PK\x03\x04": "a zip archive, or a file of an office program: unpack it, or save it as .csv",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "a file of an office program: save it as .csv",
    b"7z\xbc\xaf\x27\x1c": _ARCHIVE,
    b"Rar!\x1a\x07": _ARCHIVE,
    b"%PDF-": "a PDF: extract its text",
    b"SQLite format 3\0": "a database of SQLite: export its table",
    b"ARROW1\0": f"a file of Arrow: {_AS_PARQUET}",
    b"ORC": f"ORC: {_AS_PARQUET}",
    b"Obj\x01": f"Avro: {_AS_PARQUET}",
    b"\x93NUMPY": "an array of NumPy: write its texts, one a line",
}
#: What may begin a text, too, is told by what follows.
_BZIP2 = (b"1AY&SY", b"\x17rE8P\x90")
_TAR_AT, _TAR = 257, b"ustar"
#: How much of a beginning is shown (bytes).
_SHOWN = 8
_STANDARD_INPUT = (
    "standard input is read as jsonl: give --format txt for plain text, or the format that it has: "
    f"{', '.join(name for name in FORMATS if name not in ('jsonl', 'txt'))}"
)
_NO_ARRAY = "the format json is one array, or an object on each line"


def refuse_another(head: bytes, file_format: str, name: str, *, encoded: bool) -> None:
    """Raise InputError if a file of a format can't begin so; if somebody said that it is `encoded` so, it may be any
    text."""
    if file_format == "parquet":
        if head and not head.startswith((_PARQUET, b"PARE")):
            raise InputError(f"{name} is not parquet: it begins with {head[:_SHOWN]!r}")
        return
    kind = next((said for begins, said in _KINDS.items() if head.startswith(begins) and _is_whole(begins, head)), "")
    if head[_TAR_AT:].startswith(_TAR):
        kind = _ARCHIVE
    if kind:
        raise InputError(f"{name} is not {file_format}, but {kind}")
    if not encoded and looks_binary(head):
        raise InputError(
            f"{name} is not {file_format}: it is no text in UTF-8. If it is one in another encoding, give --dialect "
            "encoding=…, such as utf-16-le"
        )


def _is_whole(begins: bytes, head: bytes) -> bool:
    if begins == b"BZh":
        return head[4:].startswith(_BZIP2)
    return begins != b"ORC" or b"\0" in head or looks_binary(head)


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file of records, or standard input if `path` is `-`; the format may be only a guess (`guessed`).

    A file with the suffix of a compression is decompressed, and a text is read as UTF-8. Methods that read raise
    InputError if that fails.
    """

    path: str
    file_format: str
    guessed: bool
    dialect: Dialect = PLAIN
    #: What it was when it was first opened: the file's number, size and time.
    _first: list[tuple[int, ...]] = field(default_factory=list, init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "standard input" if self.path == "-" else self.path

    @property
    def rereadable(self) -> bool:
        """Whether it can be read twice: a file can, a pipe can't."""
        return self.path != "-" and Path(self.path).is_file()

    @property
    def _is_table(self) -> bool:
        return self.file_format in ("csv", "tsv")

    @property
    def _is_named_pipe(self) -> bool:
        """Whether it is a pipe beside standard input: once it is closed, what was read from it is gone."""
        return self.path != "-" and not self.rereadable

    def lines(self, rows: Rows) -> Iterator[Line]:
        """Its records and the errors of its bad lines, read lazily."""
        with self._opened() as stream:
            yield from self._reader(stream, rows)

    def plain_lines(self) -> Iterator[bytes]:
        """Its lines as they are, decompressed, read lazily; raises InputError also if one is too long."""
        with self._opened() as stream:
            yield from bounded_lines(stream, self.name)

    def found(self, rows: Rows) -> str:
        """What is special about how this text is written, as far as its beginning tells and nobody said, in words."""
        if self.file_format == "parquet" or self._is_named_pipe:
            return ""
        head, writing = self._head()
        said = [] if writing == Writing() else [str(writing.without(self.dialect))]
        if self._is_table:
            text = head.decode("utf-8", "replace")
            told = self.dialect.completed(self.file_format, text, text.lstrip("\n").partition("\n")[0], rows)
            said += self.dialect.in_words(self.file_format, told)
        return ", ".join(filter(None, said))

    def column_types(self, rows: Rows) -> dict[str, str]:
        """As :func:`embedctl.corpus.tables.column_types`; none of what is no plain parquet file."""
        if self.file_format != "parquet" or not self.rereadable or Path(self.path).suffix.lower() in COMPRESSIONS:
            return {}
        with self._opened() as stream:
            return column_types(stream, rows)

    def first_line(self) -> bytes:
        """Its first line that is not empty; of standard input, only if it is in the buffer, where it stays.

        Of any other pipe it is empty, because what is read from it would be gone.
        """
        if self._is_named_pipe:
            return b""
        if self.path != "-":
            return next((line for line in self.plain_lines() if line.strip()), b"")
        return self._head()[0].lstrip().partition(b"\n")[0]

    def check_pipe(self, rows: Rows) -> None:
        """Raise InputError if standard input, whose format is a guess, begins with no JSON object. The line stays."""
        if not self.guessed or self.path != "-":
            return
        first, end, _ = self._head()[0].partition(b"\n")
        if end:
            for line in jsonl([first], self.name, rows, hint=_STANDARD_INPUT):
                if isinstance(line, InputError):
                    raise line

    def _reader(self, stream: BinaryIO, rows: Rows) -> Iterator[Line]:
        if self.file_format == "parquet":
            compressed = Path(self.path).suffix.lower() in COMPRESSIONS
            return parquet(stream, self.name, rows, plain=self.rereadable and not compressed)
        if self.file_format == "json":
            return self._json(stream, rows)
        lines = bounded_lines(stream, self.name)
        if self.file_format == "jsonl":
            hint = _STANDARD_INPUT if self.guessed and self.path == "-" else ""
            return jsonl(lines, self.name, rows, hint=hint)
        if self.file_format == "txt":
            return txt(lines, self.name, rows, carriages=self.dialect.carriage is False)
        head = beginning(stream).removeprefix(MARK).decode("utf-8", "replace")
        first = []
        for line in lines:
            first.append(line)
            if line.strip():
                break
        names = first[-1].decode("utf-8", "surrogateescape") if first else ""
        dialect = self.dialect.completed(self.file_format, head, names, rows)
        return delimited(chain(first, lines), self.name, rows, self.file_format, dialect)

    def _json(self, stream: BinaryIO, rows: Rows) -> Iterator[Line]:
        """An array; or an object per line, as many files of this name hold."""
        if beginning(stream).removeprefix(MARK).lstrip().startswith(b"{"):
            return jsonl(bounded_lines(stream, self.name), self.name, rows, hint=_NO_ARRAY)
        return array(stream, self.name, rows)

    def _head(self) -> tuple[bytes, Writing]:
        """What a stream has in its buffer, where it stays, as UTF-8, and how it is written."""
        with self._explained(), opened(self.path) as stream:
            head = beginning(stream)
        writing = self._writing(head)
        return writing.utf_8(head), writing

    def _writing(self, head: bytes) -> Writing:
        """How this text is written; raises InputError if it is none."""
        writing = Writing.of(head, self.dialect, table=self._is_table)
        refuse_another(
            head, self.file_format, self.name, encoded=writing.encoding != "utf-8" or bool(self.dialect.encoding)
        )
        return writing

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with self._explained(), opened(self.path) as stream:
            self._check_unchanged()
            if self.file_format == "parquet":
                refuse_another(beginning(stream), "parquet", self.name, encoded=False)
                yield stream
            else:
                yield as_utf_8(stream, self._writing(beginning(stream)), self.name)
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise InputError if this file is no longer what it was when it was first opened: what was checked, or is
        queued, would not be what it holds."""
        if not self.rereadable:
            return
        now = Path(self.path).stat()
        facts = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
        self._first[:] = self._first or [facts]
        if self._first != [facts]:
            raise InputError(f"{self.name} has changed while it was read: give a copy that nothing writes to")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{self.name} can't be read: {reason}") from error
