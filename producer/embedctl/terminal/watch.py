"""Redraws the whole terminal periodically, until the user leaves."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, Self, TypeVar

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from embedctl.terminal.columns import cut, plain
from embedctl.terminal.drawing import duration
from embedctl_config.errors import BrokerUnavailable

T = TypeVar("T")

#: Time from one look to the next (seconds).
INTERVAL_S = 2.0
#: What was seen longer ago than this is marked as old (seconds).
_OLD_AFTER_S = 3 * INTERVAL_S
#: Keys, the terminal's size and what the thread saw are checked this often (seconds).
_TICK_S = 0.2
_LEAVE = b"q"
_HINT = "q leaves"


@dataclass(frozen=True, slots=True, eq=False)
class Sight(Generic[T]):
    """What was seen last, when by this host's clocks, and the error of the looks since then, if they failed."""

    what: T
    at: datetime
    moment: float
    trouble: str = ""

    @property
    def old_s(self) -> int | None:
        """Seconds since it was seen, if that is worth a word; otherwise None."""
        age_s = time.monotonic() - self.moment
        return int(age_s) if self.trouble or age_s > _OLD_AFTER_S else None


class Feed(Generic[T]):
    """Looks periodically in a thread of its own, because a Redis that does not answer must not stop the drawing. The
    first look is made before this returns, so its error is raised here."""

    def __init__(self, look: Callable[[], T], interval_s: float = INTERVAL_S) -> None:
        self._look = look
        self._interval_s = interval_s
        self._sight = Sight(look(), datetime.now(UTC), time.monotonic())
        self._failed: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="look", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Not joined, because it may wait for a Redis that does not answer.
        self._stop.set()

    def sight(self) -> Sight[T]:
        """What was seen last; raises what the last look raised, other than BrokerUnavailable: Redis may come back."""
        if self._failed is not None:
            raise self._failed
        return self._sight

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._sight = Sight(self._look(), datetime.now(UTC), time.monotonic())
            except BrokerUnavailable as error:
                self._sight = Sight(self._sight.what, self._sight.at, self._sight.moment, str(error))
            except Exception as error:  # noqa: BLE001  (raised where it is seen, in the thread that draws)
                self._failed = error
                return


def watch(
    look: Callable[[], T], draw: Callable[[T, int, int], Sequence[Text]], *, title: str, until: Callable[[T], bool]
) -> T:
    """Look every :data:`INTERVAL_S` seconds and draw it on the terminal, until `q` is pressed or, as `until` says,
    nothing can change any more; returns what was seen last. `draw` gives the lines for the columns of the terminal and
    the most rows. Raises what `look` raises, other than BrokerUnavailable after the first look. The terminal is
    restored, also after Ctrl-C."""

    def lines(sight: Sight[T], width: int, height: int) -> Group:
        head = _head(title, sight, width)
        return Group(*head, *draw(sight.what, width, height - len(head)))

    console = Console(force_terminal=True, highlight=False)
    screen = Live(console=console, screen=True, auto_refresh=False)
    drawn: object = None
    with _ended_by_sigterm(), Feed(look) as feed, _keys() as pressed, screen:
        while not until((sight := feed.sight()).what):
            now = (sight, sight.old_s, console.size)
            if now != drawn:
                screen.update(lines(sight, *console.size), refresh=True)
                drawn = now
            if _LEAVE in pressed(_TICK_S):
                break
        return sight.what


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that the terminal is restored."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def looks(look: Callable[[], T]) -> Iterator[T | BrokerUnavailable]:
    """What is seen every :data:`INTERVAL_S` seconds, or the error if Redis can't be reached; for output in lines.
    Raises BrokerUnavailable if Redis can't be reached at the first look."""
    yield look()
    while True:
        time.sleep(INTERVAL_S)
        try:
            seen: T | BrokerUnavailable = look()
        except BrokerUnavailable as error:
            seen = error
        yield seen


def can_draw() -> bool:
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def _head(title: str, sight: Sight[T], width: int) -> list[Text]:
    """The title and the time of what was seen; if that is old, a line says why."""
    right = f"{sight.at:%H:%M:%S} UTC · {_HINT}"
    left = cut(plain(title, "bold"), width - cell_len(right) - 2)
    left.pad_right(width - cell_len(left.plain) - cell_len(right))
    lines = [cut(left.append(right, "dim"), width)]
    if (old_s := sight.old_s) is not None:
        since = f"Redis has not answered since {sight.at:%H:%M:%S} UTC, for {duration(old_s)}; what follows is old. "
        lines.append(cut(plain(since + sight.trouble, "bold red"), width))
    return lines


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """Turns the terminal's echo off, and Ctrl-Z, which would leave the terminal as it is drawn. Yields a function that
    waits for some seconds and returns the pressed keys."""
    if not sys.stdin.isatty():

        def none_pressed(seconds: float) -> bytes:
            time.sleep(seconds)
            return b""

        yield none_pressed
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> bytes:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 64) if ready else b""

    try:
        tty.setcbreak(descriptor)
        now = termios.tcgetattr(descriptor)
        now[tty.CC][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSANOW, now)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
