"""Formats with columns: `csv`, `tsv` and `parquet`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from embedctl.corpus.rows import Line, Rows
from embedctl.corpus.streams import MAX_LINE_BYTES, needs_pyarrow, seekable
from embedctl_config.errors import InputError

#: Rows of parquet in memory at once.
_PARQUET_ROWS = 1024


def delimited(lines: Iterable[bytes], name: str, rows: Rows, file_format: str) -> Iterator[Line]:
    """`csv` or `tsv`, which begins with a line of column names; raises InputError if one is missing."""
    csv.field_size_limit(MAX_LINE_BYTES)
    decoded = (line.decode("utf-8", "surrogateescape") for line in lines)
    table = csv.DictReader(decoded, dialect="excel-tab" if file_format == "tsv" else "excel", strict=True)
    try:
        columns = table.fieldnames or []
    except csv.Error as error:
        raise InputError(f"{name}, line 1: not {file_format}: {error}") from None
    if columns:
        rows.check_columns(columns, f"{name}, line 1")
    while True:
        where = f"{name}, line {table.line_num + 1}"
        try:
            row = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            yield InputError(f"{where}: not {file_format}: {error}")
            continue
        if any(row.get(None, ())):  # what is left over; empty fields are harmless
            yield InputError(
                f"{where}: more fields than the {len(columns)} columns of line 1; a text that holds the separator "
                "must be quoted"
            )
            continue
        yield rows.line(row, where)


def parquet(stream: BinaryIO, name: str, rows: Rows, *, plain: bool) -> Iterator[Line]:
    """Parquet; raises InputError if it is none, or a column is missing. `plain` is as for :func:`seekable`."""
    pyarrow = needs_pyarrow("reading parquet")
    try:
        with seekable(stream, plain=plain) as whole:
            file = pyarrow.parquet.ParquetFile(whole)
            rows.check_columns(_nested(file.schema_arrow), name)
            columns = list(dict.fromkeys((rows.text_field, rows.id_field, *rows.keep)))
            # Columns that are not there are left out, and a path selects one field of a struct.
            batches = file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                # A struct that is null has no fields.
                yield rows.line(row, f"{name}, row {number}", absent=None)
    except pyarrow.ArrowException as error:
        raise InputError(f"{name} can't be read as parquet: {error}") from error


def _nested(fields: Iterable[Any]) -> dict[str, Any]:
    """Names of columns → None, or the same of the fields inside."""
    is_struct = needs_pyarrow("reading parquet").types.is_struct
    return {field.name: _nested(field.type) if is_struct(field.type) else None for field in fields}
