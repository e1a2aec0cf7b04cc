"""How far a command is and how fast, in one line: for a terminal of any width, or for a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from embedctl.terminal.columns import cut, plain
from embedctl.terminal.drawing import bar, duration, number

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SPINS_PER_S = 10
_LEAST_BAR, _MOST_BAR = 5, 40
#: Facts of a higher rank are left out first where there is no room; those of rank 0 always stay.
_BAR_RANK, _MOST_RANK = 3, 4


@dataclass(frozen=True, slots=True)
class Activity:
    """What a command does at this moment. Counts are of records.

    Attributes:
        what: one word.
        total: None if it is unknown.
        growing: whether the total may still grow.
        written: records in the file, where `done` does not count these.
        since: when it began, by the monotonic clock, if it has no count.
        waits_for: what it waits for, or an empty string.
    """

    what: str
    done: int = 0
    total: int | None = None
    growing: bool = False
    written: int | None = None
    records_per_s: float | None = None
    tokens_per_s: float | None = None
    seconds_left: float | None = None
    since: float | None = None
    waits_for: str = ""


def progress_line(now: Activity, width: int) -> Text:
    """A line with a bar, or with something that moves; what matters least is left out of a narrow one.

    Args:
        width: most cells.
    """
    head = f"{now.what:<10} "
    if now.since is not None:
        return cut(plain(f"{head}{_spinner()} {time.monotonic() - now.since:.0f} s"), width)
    facts = [*_facts(now, "/", width)]
    for rank in range(_MOST_RANK, -1, -1):
        tail = "  ".join(fact for each, fact in facts if each <= rank)
        room = width - cell_len(head + tail)
        with_bar = bool(now.total) and rank >= _BAR_RANK
        if room >= (_LEAST_BAR + 2 if with_bar else 0):
            break
    line = plain(head)
    if with_bar and now.total:
        line.append_text(bar(now.done / now.total, min(_MOST_BAR, room - 2))).append("  ")
    return cut(line.append(tail), width)


def progress_words(now: Activity) -> str:
    """The same without a bar, for a log."""
    return f"{now.what}: {', '.join(fact for _, fact in _facts(now, ' of '))}"


def _facts(now: Activity, of: str, width: int | None = None) -> Iterator[tuple[int, str]]:
    """Each fact and its rank.

    Args:
        of: what stands between the number done and the total.
    """
    total = "" if now.total is None else f"{of}{now.total:,}{'+' if now.growing else ''}"
    yield 0, f"{now.done:,}{total}{'' if total and width else ' records'}"
    if now.written is not None:
        yield 2, f"{now.written:,} written"
    if now.records_per_s is not None:
        yield 1, f"{number(now.records_per_s, width)} records/s"
    if now.tokens_per_s is not None:
        yield _MOST_RANK, f"{number(now.tokens_per_s, width)} tokens/s"
    if now.seconds_left is not None:
        yield 1, f"{duration(now.seconds_left)} left"
    if now.waits_for:
        yield 0, f"waiting for {now.waits_for}"


def _spinner() -> str:
    return _SPINNER[int(time.monotonic() * _SPINS_PER_S) % len(_SPINNER)]
