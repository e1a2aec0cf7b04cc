"""A table as CSV: values as they were measured, not as they are shown."""

from __future__ import annotations

import csv
import io

from embedctl_bench.report.report import MARKS, Table


def lines(table: Table) -> str:
    """A heading of column keys, and a line for each row; the last columns hold a row's marks."""
    keys = [column.key for column in table.columns]
    marks = [mark for mark in MARKS if any(row.get(mark) for row in table.rows)]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*keys, *(mark.removeprefix("_") for mark in marks)])
    for row in table.rows:
        writer.writerow([*(row.get(key) for key in keys), *("yes" if row.get(mark) else "" for mark in marks)])
    return stream.getvalue()
