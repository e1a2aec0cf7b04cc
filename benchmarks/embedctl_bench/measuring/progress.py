"""Progress of a benchmark on standard error: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import re

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

#: The end of a copy's name, and of a workload's: eight or more digits of a digest.
_DIGEST = re.compile(r"[- ][0-9a-f]{8,}$")


class Progress:
    """Steps done of those planned, and the time left, estimated from the steps that took time."""

    def __init__(self, name: str, plan: int) -> None:
        self._name, self._plan, self._done = name, plan, 0
        self._seconds: list[float] = []
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[step]}"),
        )
        # No thread draws it, because that would take time from what is measured.
        self._bar = Bar(*columns, console=self._console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task(name, total=plan, step="")

    def start(self) -> None:
        """Begin to show it."""
        if self._console.is_terminal:
            self._bar.start()

    def stop(self) -> None:
        """Stop showing it."""
        if self._console.is_terminal:
            self._bar.stop()

    def begin(self, step: str) -> None:
        """A step is about to be measured."""
        self._draw(step)

    def advance(self, step: str, seconds: float) -> None:
        """A step is done; `seconds` is 0 if an earlier run measured it."""
        self._done += 1
        self._plan = max(self._plan, self._done)
        if seconds:
            self._seconds.append(seconds)
        if self._console.is_terminal:
            self._draw(step)
        else:
            took = f"{seconds:.1f} s" if seconds else "measured before"
            self.say(f"{self._name} {self._done}/{self._plan}: {in_words(step)}: {took}; {self.left()}")

    def more(self, steps: int) -> None:
        """Change the plan by this number of steps."""
        self._plan = max(self._done, self._plan + steps)

    def left(self) -> str:
        """The time left, if the remaining steps take as long as those so far."""
        to_come = self._plan - self._done
        if not to_come:
            return "done"
        if not self._seconds:
            return "time left unknown"
        left = to_come * sum(self._seconds) / len(self._seconds)
        if left < 90:
            return f"about {left:.0f} s left"
        return f"about {left / 60:.0f} min left" if left < 5400 else f"about {left / 3600:.1f} h left"

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _draw(self, step: str) -> None:
        words = escape(f"{self.left()}; {in_words(step)}")
        self._bar.update(self._task, completed=self._done, total=self._plan, step=words, refresh=True)


def in_words(step: str) -> str:
    """A step's key as people read it: what is measured first, then the rest from the particular to the general."""
    *places, subject = (_in_words(part) for part in step.split("/"))
    return f"{subject}: {', '.join(reversed(places))}" if places else subject


def _in_words(part: str) -> str:
    part = _DIGEST.sub("", part)
    if part == "setting":
        return "choosing its setting"
    return re.sub(r"^(\d+)(?: again (\d+))?$", lambda found: f"round {found[1]}{' again' if found[2] else ''}", part)
