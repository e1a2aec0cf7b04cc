"""A line at the bottom of a terminal that moves while a command works, below all that it prints."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

#: The line is drawn again this often, if it has changed (seconds).
_TICK_S = 0.1
_ERASE_BELOW = "\x1b[J"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


class BottomLine:
    """Draws one line on standard error. Whatever else is written there goes above it.

    The cursor rests at the line's beginning. So neither the `^C` that a terminal echoes nor the output of another
    process can break the line in two; and where a terminal that became narrower has broken it, all of it is erased.

    Args:
        draw: the line in at most this many cells.
        ticks: whether a thread draws it again and again; otherwise :meth:`show` does.
    """

    def __init__(self, draw: Callable[[int], Text], *, ticks: bool = True) -> None:
        self._terminal = Console(stderr=True)
        # One of its own for the colours: others may be in the middle of printing above the line.
        colours: Any = self._terminal.color_system
        self._console = Console(file=io.StringIO(), force_terminal=True, color_system=colours)
        self._draw = draw
        self._stream: TextIO = sys.stderr
        self._above = _Above(self)
        self._lock = threading.RLock()
        self._shown = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bottom line", daemon=True) if ticks else None

    def start(self) -> None:
        """Begin to show it."""
        sys.stderr = self._above
        if self._thread is not None:
            self._thread.start()

    def stop(self, *, keep: bool) -> None:
        """Leave the line on the terminal as it is now, or erase it."""
        self._above.end_line()
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        sys.stderr = self._stream
        self.write(f"{self._drawn()}\n" if keep else f"\r{_ERASE_BELOW}")

    @contextmanager
    def above(self) -> Iterator[None]:
        """Erases the line, and draws it again below what the block writes to the terminal."""
        with self._lock:
            if not self._over.is_set():  # somebody may hold our standard error for longer
                self.write(f"\r{_ERASE_BELOW}")
            self._shown = ""
            try:
                yield
            finally:
                self.show()

    def _run(self) -> None:
        while not self._over.wait(_TICK_S):
            self.show()

    def show(self) -> None:
        """Draw it, if it has changed."""
        with self._lock:
            drawn = self._drawn()
            if drawn != self._shown and not self._over.is_set():
                self.write(drawn)
                self._shown = drawn

    def _drawn(self) -> str:
        # One cell less than the terminal has: in its last column, erasing what is below would erase the last letter.
        width = self._terminal.width - 1
        with self._console.capture() as captured:
            self._console.print(self._draw(width), end="", soft_wrap=True, highlight=False)
        # The terminal may become narrower before it reads this.
        return f"\r{_NO_WRAP}{captured.get()}{_WRAP}{_ERASE_BELOW}\r"

    def write(self, text: str) -> None:
        """Write to the terminal, past the line."""
        with suppress(OSError):  # the terminal is gone, but the work need not end with it
            self._stream.write(text)
            self._stream.flush()


class _Above(io.TextIOBase):
    """Standard error while there is a bottom line: whole lines go above it."""

    def __init__(self, line: BottomLine) -> None:
        self._line = line
        self._stream: TextIO = sys.stderr
        self._begun = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of a stream it is read-only
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        whole, end, self._begun = (self._begun + text).rpartition("\n")
        if end:
            with self._line.above():
                self._line.write(whole + end)
        return len(text)

    def end_line(self) -> None:
        """Write what is left of a line without an end."""
        if self._begun:
            self.write("\n")
