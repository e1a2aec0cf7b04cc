"""Formats with columns: `csv`, `tsv` and `parquet`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, BinaryIO

from embedctl.corpus.column_types import python_rows, type_at, written
from embedctl.corpus.dialect import Dialect, names_separator
from embedctl.corpus.rows import Line, Rows
from embedctl.corpus.streams import MAX_LINE_BYTES, NULS, needs_pyarrow, seekable
from embedctl_config.errors import InputError

#: How an error of the module csv begins → what is said.
_ERRORS = {
    "unexpected end of data": "a quote is opened and never closed",
    "new-line character seen": "a carriage return stands within the line, outside of quotes",
}
_AFTER_QUOTE = (
    "text stands after a closing quote: a quote that is text is doubled, or stands after a backslash if you give "
    "--dialect escape=backslash"
)
#: With escapes, what a backslash stands before is a lone surrogate until the row is divided. What is no UTF-8 comes as
#: others of them.
_HIDDEN = 0xD800
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
#: Without quotes, a backslash and a letter stand for what would end a field or a row, as databases write it, and `\N`
#: for null.
_LETTERS = {"t": "\t", "n": "\n", "r": "\r"}
_NULL = r"\N"
#: Rows of parquet in memory at once.
_PARQUET_ROWS = 1024


class _Escapes:
    """Hides what stands after a backslash from the division of a row into fields, and shows it again."""

    def __init__(self, dialect: Dialect) -> None:
        plain = {each: each for each in (dialect.quote, dialect.separator, "\\") if each}
        plain |= {} if dialect.quote else _LETTERS
        self._hidden = {name: chr(_HIDDEN + at) for at, name in enumerate(plain)}
        self._shown = {_HIDDEN + at: text for at, text in enumerate(plain.values())}

    def hide(self, line: str) -> str:
        return _ESCAPED.sub(lambda found: self._hidden.get(found[1], found[0]), line)

    def show(self, fields: list[str]) -> list[Any]:
        return [None if field == _NULL else field.translate(self._shown) for field in fields]


class _Lines:
    """The lines of a table, which can be read again from the second of a row: of a row that is none, only the first
    line is bad, because a quote that is never closed runs on to the next one, or to the end of the file.

    Attributes:
        number: of the line that was read last, from 1.
    """

    def __init__(self, lines: Iterable[bytes], escapes: _Escapes | None) -> None:
        self._lines = iter(lines)
        self._escapes = escapes
        self._row: list[str] = []
        self._again: list[str] = []
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.pop() if self._again else self._decoded(next(self._lines))
        self.number += 1
        self._row.append(line)
        return line

    def begin_row(self) -> None:
        self._row.clear()

    def give_back(self, keep: int) -> None:
        """Read the row's lines again, without the first ones, as many as are to be kept."""
        given_back = self._row[keep:]
        self._again += reversed(given_back)
        self.number -= len(given_back)

    def _decoded(self, line: bytes) -> str:
        text = line.decode("utf-8", "surrogateescape")
        return text if self._escapes is None else self._escapes.hide(text)


def delimited(lines: Iterable[bytes], name: str, rows: Rows, file_format: str, dialect: Dialect) -> Iterator[Line]:
    """`csv` or `tsv` of a dialect of which all is known, which begins with a line of column names; raises InputError if
    one is missing or stands twice."""
    csv.field_size_limit(MAX_LINE_BYTES)
    escapes = _Escapes(dialect) if dialect.escapes else None
    source = _Lines(lines, escapes)
    table = csv.reader(
        source,
        delimiter=str(dialect.separator),
        quotechar=dialect.quote or None,
        quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
        strict=True,
    )
    source.give_back(keep=1 if names_separator(next(source, "")) else 0)
    columns: list[str] = []
    while True:
        source.begin_row()
        where = f"{name}, line {source.number + 1}"
        try:
            fields = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            wrong = InputError(f"{where}: not {file_format}: {_in_words(error)}")
            if not columns:
                raise wrong from None
            source.give_back(keep=1)
            yield wrong
            continue
        if not fields:
            continue
        if not columns:
            columns = fields
            rows.check_once(columns, where)
            rows.check_columns(columns, where)
        elif _may_be_wrong(fields, columns) and (wrong_row := _wrong(fields, columns, where, dialect)):
            yield wrong_row
        else:
            values = escapes.show(fields) if escapes else fields
            yield rows.line(dict(zip_longest(columns, values[: len(columns)])), where)


def _may_be_wrong(fields: list[str], columns: list[str]) -> bool:
    return len(fields) != len(columns) or fields[0] in columns or fields[0][:1] == "\0"


def _wrong(fields: list[str], columns: list[str], where: str, dialect: Dialect) -> InputError | None:
    """Why a row is none; raises InputError if all that follow it would be wrong."""
    if fields[0] in columns and sorted(fields) == sorted(columns):
        if fields != columns:
            raise InputError(f"{where}: the columns have another order from here on, as in files that were joined")
        return InputError(f"{where}: the names of the columns once more, as in files that were joined")
    if any(fields[len(columns) :]):  # empty fields are harmless
        advice = (
            "a text that holds the separator must be quoted"
            if dialect.quote
            else "a text can't hold the separator, unless fields are in quotes: then give --dialect quote=double"
        )
        return InputError(f"{where}: more fields than the {len(columns)} columns; {advice}")
    if len(fields) == 1 and fields[0] and not fields[0].strip("\0"):
        return InputError(f"{where}: {NULS}")
    return None


def _in_words(error: csv.Error) -> str:
    if " expected after " in str(error):
        return _AFTER_QUOTE
    return next((said for begins, said in _ERRORS.items() if str(error).startswith(begins)), str(error))


def parquet(stream: BinaryIO, name: str, rows: Rows, *, plain: bool) -> Iterator[Line]:
    """Parquet; raises InputError if it is none, or a column is missing. `plain` is as for :func:`seekable`."""
    pyarrow = needs_pyarrow("reading parquet")
    try:
        with seekable(stream, plain=plain) as whole:
            file = pyarrow.parquet.ParquetFile(whole, arrow_extensions_enabled=True, page_checksum_verification=True)
            rows.check_once(file.schema_arrow.names, name)
            rows.check_columns(_nested(file.schema_arrow), name)
            # Columns that are not there are left out, and a path selects one field of a struct.
            batches = file.iter_batches(batch_size=_PARQUET_ROWS, columns=rows.fields)
            number = 0
            for number, row in enumerate((row for batch in batches for row in python_rows(batch)), start=1):
                # A struct that is null has no fields.
                yield rows.line(row, f"{name}, row {number}", absent=None)
            if number != file.metadata.num_rows:
                raise InputError(f"{name} has {file.metadata.num_rows:,} rows, and {number:,} could be read")
    except pyarrow.ArrowException as error:
        raise InputError(f"{name} can't be read as parquet: {error}") from error


def column_types(stream: BinaryIO, rows: Rows) -> dict[str, str]:
    """The types of the columns of a parquet file that hold the id and what is kept, as text."""
    pyarrow = needs_pyarrow("reading parquet")
    try:
        schema = pyarrow.parquet.read_schema(stream)
    except pyarrow.ArrowException:
        return {}  # the reader of the records reports the damage
    names = {"id": rows.id_field, **{name: name for name in rows.keep}}
    found = {name: type_at(schema, path) for name, path in names.items()}
    return {name: written(name, kind) for name, kind in found.items() if kind is not None}


def _nested(fields: Iterable[Any]) -> dict[str, Any]:
    """Names of columns → None, or the same of the fields inside."""
    is_struct = needs_pyarrow("reading parquet").types.is_struct
    return {field.name: _nested(field.type) if is_struct(field.type) else None for field in fields}
