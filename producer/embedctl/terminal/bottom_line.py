"""A line at the bottom of a terminal that moves while a command works, below all that it prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.segment import ControlType, Segment, Segments
from rich.text import Text

_DRAWS_PER_S = 10.0


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
