"""The markup in a report's texts: `**bold**`, and code in backticks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from embedctl_bench.report.report import MARKS, Column, Table

_MARKUP = re.compile(r"\*\*(?P<bold>.+?)\*\*|`(?P<code>[^`]+)`")

Kind = Literal["plain", "bold", "code"]


def pieces(text: str) -> Iterator[tuple[Kind, str]]:
    """The text piece by piece, without its marks."""
    at = 0
    for found in _MARKUP.finditer(text):
        if found.start() > at:
            yield "plain", text[at : found.start()]
        yield ("bold", found["bold"]) if found["bold"] else ("code", found["code"])
        at = found.end()
    if at < len(text):
        yield "plain", text[at:]


def marks(row: Mapping[str, object]) -> list[str]:
    """The words for the marks of a table's row."""
    return [word for mark, word in MARKS.items() if row.get(mark)]


def is_number(column: Column, table: Table) -> bool:
    """Whether a column's values are numbers, which are aligned on the right."""
    values = [value for row in table.rows if (value := row.get(column.key)) is not None]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return column.digits is not None or (bool(values) and numbers)


def fact(value: object) -> str:
    """A fact of a machine in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {fact(each)}" for name, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
