"""How far a download is."""

from __future__ import annotations

import time
from collections.abc import Callable

from embedctl.common.rates import Rate, seconds_left

#: A log gets a line this often (seconds).
_LOG_EVERY_S = 10.0


class Progress:
    """Tells by `say` how far a download is: if `in_log`, :meth:`line` now and then; a terminal draws it instead."""

    def __init__(self, say: Callable[[str], None], *, in_log: bool = True) -> None:
        self.say = say
        self._in_log = in_log
        self._total = self._done = 0
        self._said, self._rate = 0.0, Rate()

    def begin(self, total: int, had: int) -> None:
        """A download of `total` bytes begins; `had` of them are there already."""
        self._total, self._done = total, had
        self._said, self._rate = time.monotonic(), Rate()
        self._rate.add(self._said, had)

    def advance(self, more: int) -> None:
        """More bytes are there; less than 0 if they are fetched again."""
        self._done += more
        now = time.monotonic()
        if self._in_log and self._total and now - self._said >= _LOG_EVERY_S:
            self._said = now
            self.say(self.line())

    def line(self) -> str:
        """How far it is, how fast, and the time left; empty before it begins."""
        if not self._total:
            return ""
        (per_s,) = self._rate.add(time.monotonic(), self._done) or (0.0,)
        left_s = seconds_left(self._total - self._done, per_s)
        return (
            f"{100 * self._done / self._total:.0f} %: {megabytes(self._done)} of {megabytes(self._total)}, "
            f"{megabytes(per_s)}/s" + ("" if left_s is None else f", {left_s:.0f} s left")
        )


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
