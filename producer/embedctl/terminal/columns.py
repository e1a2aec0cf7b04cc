"""Tables that fit a terminal: columns shrink, and the least important ones are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from embedctl_config.printable import printable

_GAP = 2
_NARROW_GAP = 1

#: A line: cells in columns, or one text across all of them.
Row = Sequence[Text] | Text


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. It is left out below a width of `least` cells. Columns of a higher `rank` shrink, and are
    left out, first; those of rank 0 always stay. `floor` is the least width in cells if there is room, so that the
    column does not move as its numbers change."""

    head: str
    least: int
    rank: int = 0
    right: bool = False
    floor: int = 0


def plain(value: str, style: str = "") -> Text:
    """A text in one line, with control characters escaped: names and messages of workers can hold any."""
    return Text(printable(value), style=style, no_wrap=True)


def cut(line: Text, width: int | None) -> Text:
    if width is not None:
        line.truncate(max(0, width), overflow="ellipsis")
    return line


def arrange(columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> list[Text]:
    """The lines of a table, its heads and then its rows, for a terminal of this many cells; None for no limit."""
    cells = [[plain(column.head, "bold") for column in columns], *(row for row in rows if not isinstance(row, Text))]
    natural = [
        max(column.floor, *(cell_len(row[at].plain) for row in cells)) if cells else 0
        for at, column in enumerate(columns)
    ]
    widths, gap = _fitted(columns, natural, width)
    head, *_ = cells
    return [
        cut(row.copy() if isinstance(row, Text) else _line(columns, row, widths, gap), width) for row in (head, *rows)
    ]


def _fitted(columns: Sequence[Column], natural: Sequence[int], width: int | None) -> tuple[list[int], int]:
    """The width of each column, 0 if it is left out, and the gap between columns."""
    widths = list(natural)
    if width is None or sum(widths) + _GAP * (len(widths) - 1) <= width:
        return widths, _GAP
    expendable = sorted(range(len(columns)), key=lambda at: -columns[at].rank)
    while True:
        shown = [at for at in expendable if widths[at]]
        over = sum(widths) + _NARROW_GAP * (len(shown) - 1) - width
        for at in shown:
            shrunk = max(min(columns[at].least, widths[at]), widths[at] - max(0, over))
            over -= widths[at] - shrunk
            widths[at] = shrunk
        if over <= 0:
            return widths, _NARROW_GAP
        leaves = next((at for at in shown if columns[at].rank), None)
        if leaves is None:
            return widths, _NARROW_GAP
        # The others get back what they gave up for the column that is left out.
        widths = [natural[at] if widths[at] and at != leaves else 0 for at in range(len(columns))]


def _line(columns: Sequence[Column], row: Sequence[Text], widths: Sequence[int], gap: int) -> Text:
    line = plain("")
    owed = 0
    for column, cell, width in zip(columns, row, widths, strict=True):
        if width:
            taken = cell_len(cell.plain)
            shown = cell if taken <= width else cut(cell.copy(), width)
            rest = width - (taken if taken <= width else cell_len(shown.plain))
            line.append(" " * (owed + rest * column.right)).append_text(shown)
            owed = gap + rest * (not column.right)
    line.rstrip()
    return line


def share(room: int, wants: Sequence[int]) -> list[int]:
    """Divide lines among several parts: none gets more than it wants, and what it does not want goes to the others."""
    given = [0] * len(wants)
    for done, at in enumerate(sorted(range(len(wants)), key=lambda at: wants[at])):
        given[at] = min(wants[at], room // (len(wants) - done))
        room -= given[at]
    return given
