"""How far a download is."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A line for people is made this often: on a terminal that redraws it, and in a log (seconds).
_DRAW_EVERY_S, _LOG_EVERY_S = 0.1, 10.0


class Progress:
    """Tells how far a download is, and what it waits for.

    Args:
        say: writes a line.
        draw: shows a line in place of the last one; None where there is no terminal.
    """

    def __init__(self, say: Callable[[str], None], draw: Callable[[str], None] | None = None) -> None:
        self.say = say
        self._show, self._every_s = (draw, _DRAW_EVERY_S) if draw else (say, _LOG_EVERY_S)
        self._total = self._had = self._done = 0
        self._began = self._shown = time.monotonic()

    def begin(self, total: int, had: int) -> None:
        """A download of `total` bytes begins; `had` of them are there already."""
        self._total, self._had, self._done = total, had, had
        self._began = self._shown = time.monotonic()

    def advance(self, more: int) -> None:
        """More bytes are there; less than 0 if they are fetched again."""
        self._done += more
        now = time.monotonic()
        if now - self._shown >= self._every_s and self._total:
            self._shown = now
            self._show(self._line(now - self._began))

    def _line(self, seconds: float) -> str:
        rate = max(0, self._done - self._had) / seconds if seconds > 0 else 0.0
        left = f", {(self._total - self._done) / rate:.0f} s left" if rate else ""
        return (
            f"{100 * self._done / self._total:.0f} %: {megabytes(self._done)} of {megabytes(self._total)}, "
            f"{megabytes(rate)}/s{left}"
        )


def megabytes(size: float) -> str:
    """A size in bytes, for people."""
    return f"{size / 1e6:,.1f} MB"
