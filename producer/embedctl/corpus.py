"""Corpus files and streams as records: jsonl, txt, csv, tsv and parquet, plain or compressed."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from embedctl.kept import check_has, kept_fields, names_with_values
from embedctl.records import Record, check_id, kind_of, make_record, no_field, text_and_id
from embedctl_config.errors import InputError, MissingExtra

log = logging.getLogger(__name__)

FORMATS = ("jsonl", "csv", "tsv", "txt", "parquet")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".txt": "txt", ".parquet": "parquet"}
_COMPRESSIONS = (".gz", ".zst")
#: The longest line that is read (bytes), so that one line can't take the machine's memory.
MAX_LINE_BYTES = 64 * 1024 * 1024
_PARQUET_ROWS = 1024
#: The byte order mark that some editors write before UTF-8.
_MARK = b"\xef\xbb\xbf"

#: A record, or the error of a line that holds no record.
_Line = Record | InputError


@dataclass(frozen=True, slots=True)
class Corpus:
    """A file of records, or standard input if `path` is `-`.

    `txt` has one record per line; an empty line is an (empty) record, so that vectors and lines have the same numbers.
    `jsonl` has one object per line and skips empty lines. `csv` and `tsv` begin with a line of field names. A file with
    the suffix `.gz` or `.zst` is decompressed. The fields in `keep` travel with the records; a `txt` has
    only the text.
    """

    path: str
    file_format: str
    text_field: str
    id_field: str
    max_bytes: int
    keep: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "standard input" if self.path == "-" else self.path

    @property
    def rereadable(self) -> bool:
        """Whether it can be read twice: a file can, a pipe can't."""
        return self.path != "-" and Path(self.path).is_file()

    @property
    def _compressed(self) -> bool:
        return Path(self.path).suffix.lower() in _COMPRESSIONS

    def records(self, on_bad_line: Callable[[InputError], None] | None = None) -> Iterator[Record]:
        """Its records, read lazily.

        Args:
            on_bad_line: called with the error of each line that is not a record, which is then skipped; if None, the
                error is raised.

        Raises:
            InputError: the file can't be read, or a line is not a record; the message names the line.
        """
        try:
            for line in self._lines():
                if isinstance(line, Record):
                    yield line
                elif on_bad_line is None:
                    raise line
                else:
                    on_bad_line(line)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{self.name} can't be read: {reason}") from error

    def check(self) -> None:
        """Read the whole file once, to find a bad line before anything is queued. A field to keep that no record has is
        logged, because its name may be misspelt.

        Raises:
            InputError: as for :meth:`records`, or the file holds no record.
        """
        empty, absent = True, set(self.keep)
        for record in self.records():
            empty = False
            if absent:
                absent -= names_with_values(record.kept)
        if empty:
            raise InputError(f"{self.name} holds no record")
        if absent:
            log.warning("%s: no record has a value in %s: kept as null", self.name, ", ".join(sorted(absent)))

    def _lines(self) -> Iterator[_Line]:
        if self.file_format == "parquet":
            yield from self._parquet()
            return
        with self._open() as stream:
            if self.file_format == "jsonl":
                yield from self._jsonl(stream)
            elif self.file_format == "txt":
                yield from self._txt(stream)
            else:
                yield from self._csv(stream)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self.path == "-":
            if sys.stdin is None:
                raise InputError("standard input is closed")
            yield sys.stdin.buffer
            return
        suffix = Path(self.path).suffix.lower()
        with Path(self.path).open("rb") as raw:
            if suffix == ".gz":
                with gzip.open(raw) as stream:
                    yield cast("BinaryIO", stream)
            elif suffix == ".zst":
                pyarrow = _pyarrow("reading .zst")
                yield io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
            else:
                yield raw

    def _jsonl(self, stream: BinaryIO) -> Iterator[_Line]:
        for number, line in enumerate(_bounded_lines(stream, self.name), start=1):
            if not line.strip():
                continue
            where = f"{self.name}, line {number}"
            try:
                item = _load(line, where)
                text, label = text_and_id(item, self.text_field, self.id_field, where)
                kept = kept_fields(item, self.keep, where)
                record = make_record(text, check_id(label, where), self.max_bytes, kept)
            except InputError as error:
                yield error
            else:
                yield record

    def _txt(self, stream: BinaryIO) -> Iterator[_Line]:
        if self.keep:
            check_has([self.text_field], self.keep, self.name)
        for number, line in enumerate(_bounded_lines(stream, self.name), start=1):
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            try:
                kept = kept_fields({self.text_field: text}, self.keep, f"{self.name}, line {number}")
            except InputError as error:
                yield error
            else:
                yield make_record(text, None, self.max_bytes, kept)

    def _csv(self, stream: BinaryIO) -> Iterator[_Line]:
        lines = (line.decode("utf-8", "surrogateescape") for line in _bounded_lines(stream, self.name))
        csv.field_size_limit(MAX_LINE_BYTES)
        rows = csv.DictReader(lines, dialect="excel-tab" if self.file_format == "tsv" else "excel", strict=True)
        try:
            fields = rows.fieldnames or []
        except csv.Error as error:
            raise InputError(f"{self.name}, line 1: not {self.file_format}: {error}") from None
        if fields and self.text_field not in fields:
            raise no_field(self.text_field, fields, f"{self.name}, line 1")
        if fields:
            check_has(fields, self.keep, f"{self.name}, line 1")
        while True:
            where = f"{self.name}, line {rows.line_num + 1}"
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield InputError(f"{where}: not {self.file_format}: {error}")
                continue
            try:
                label, kept = check_id(row.get(self.id_field), where), kept_fields(row, self.keep, where)
                record = make_record(row[self.text_field], label, self.max_bytes, kept)
            except InputError as error:
                yield error
            else:
                yield record

    def _parquet(self) -> Iterator[_Line]:
        pyarrow = _pyarrow("reading parquet")
        try:
            with self._open() as packed, _seekable(packed, plain=self.rereadable and not self._compressed) as stream:
                file = pyarrow.parquet.ParquetFile(stream)
                names = file.schema_arrow.names
                if self.text_field not in names:
                    raise no_field(self.text_field, names, self.name)
                check_has(names, self.keep, self.name)
                columns = [self.text_field, *([self.id_field] if self.id_field in names else []), *self.keep]
                row = 0
                for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(dict.fromkeys(columns))):
                    for item in batch.to_pylist():
                        row += 1
                        where = f"{self.name}, row {row}"
                        try:
                            label, kept = check_id(item.get(self.id_field), where), kept_fields(item, self.keep, where)
                        except InputError as error:
                            yield error
                        else:
                            yield make_record(item[self.text_field], label, self.max_bytes, kept)
        except pyarrow.ArrowException as error:
            raise InputError(f"{self.name} can't be read as parquet: {error}") from error


def open_corpus(
    path: str,
    *,
    file_format: str | None = None,
    text_field: str = "text",
    id_field: str = "id",
    keep: Sequence[str] = (),
    max_bytes: int,
) -> Corpus:
    """The corpus at a path; nothing is read yet.

    Raises:
        InputError: the format is unknown, or can't be guessed from the name.
    """
    chosen = file_format or guess_format(path)
    if chosen not in FORMATS:
        raise InputError(f"format {chosen!r} is none of {', '.join(FORMATS)}")
    return Corpus(path, chosen, text_field, id_field, max_bytes, keep)


def guess_format(path: str) -> str:
    """The format by a file's name; `jsonl` for standard input.

    Raises:
        InputError: the name has no known suffix.
    """
    if path == "-":
        return "jsonl"
    plain = Path(path)
    if plain.suffix.lower() in _COMPRESSIONS:
        plain = plain.with_suffix("")
    suffix = plain.suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    raise InputError(
        f"{path}: can't tell the format from {suffix or 'a name without suffix'!r}; give --format {'|'.join(FORMATS)}"
    )


@contextmanager
def _seekable(stream: BinaryIO, *, plain: bool) -> Iterator[BinaryIO]:
    """A stream with random access, which parquet needs; unless it is a plain file, it is copied to the disk first."""
    if plain:
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        yield cast("BinaryIO", copy)


def _bounded_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise InputError(f"{name}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MiB")
        if number == 1 and line.startswith(_MARK):
            line = line.removeprefix(_MARK)
            if not line:
                continue
        yield line


def _load(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        # Bytes that are not UTF-8 become lone surrogates, so that only the text is bad, not the whole line.
        value = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected an object such as {{"text": …}}, found {kind_of(value)}')
    return value


def _pyarrow(needed_for: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("parquet", needed_for) from error
    return pyarrow
