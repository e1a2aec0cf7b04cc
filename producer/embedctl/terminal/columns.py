"""Tables that fit a terminal: columns shrink, and the least important ones are left out; and a line at its bottom."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.segment import ControlType, Segment, Segments
from rich.text import Text

from embedctl_config.printable import printable

_GAP = 2
_NARROW_GAP = 1

#: A line: cells in columns, or one text across all of them.
Row = Sequence[Text] | Text
_DRAWS_PER_S = 10.0


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


def _sequence(text: str) -> Segments:
    """A control sequence that rich has no name for; the type only marks it as one without a width."""
    return Segments([Segment(text, None, [(ControlType.CARRIAGE_RETURN,)])])


#: Erases the line, even where a terminal that became narrower has broken it.
_ERASE = _sequence("\r\x1b[J")
#: The line does not wrap: the terminal may become narrower before it reads this.
_BEGIN, _END = _sequence("\x1b[?7l"), _sequence("\x1b[?7h\r")


class BottomLine(Live):
    """Draws one line on standard error. What the console prints, and what else is written there, goes above it.

    The cursor rests at the line's beginning. So neither the `^C` that a terminal echoes nor the output of another
    process can break the line in two; and where a terminal that became narrower has broken it, all of it is erased. The
    console wraps no text, because users copy from it. `draw` gives the line in at most so many cells.
    """

    def __init__(self, console: Console, draw: Callable[[int], Text]) -> None:
        console.soft_wrap = True
        console.file = cast("TextIO", _Lasting(sys.stderr))
        super().__init__(console=console, refresh_per_second=_DRAWS_PER_S, redirect_stdout=False)
        self._draw = draw
        self._drawn: Text | None = None

    def start(self, refresh: bool = False) -> None:
        super().start(refresh)
        # Live hides the cursor, and a process that is killed would leave the terminal without one.
        self.console.show_cursor()

    def end(self, *, keep: bool) -> None:
        """Leave the line on the terminal as it is now, or erase it."""
        sys.stderr.flush()  # of a line without an end, what is left
        self.transient = not keep
        self.stop()

    @contextmanager
    def above(self) -> Iterator[None]:
        """Erases the line, and draws it again below what the block writes to the terminal past standard error."""
        self.end(keep=False)
        try:
            yield
        finally:
            self.start()

    def refresh(self) -> None:
        """Draw it, if it has changed or ended."""
        if not self.is_started or self._line() != self._drawn:
            super().refresh()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        self._drawn = self._line()
        if self.is_started:
            return [_ERASE, *renderables, _BEGIN, self._drawn, _END]
        if self.transient:
            return [_ERASE, *renderables]
        self._drawn.end = "\n"
        return [_ERASE, *renderables, self._drawn]

    def _line(self) -> Text:
        # One cell less than the terminal has: in its last column, some terminals wrap at once.
        line = self._draw(self.console.width - 1)
        line.end = ""
        return line


class _Lasting:
    """A terminal's stream. If the terminal is gone, what is written is lost, and the work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()
