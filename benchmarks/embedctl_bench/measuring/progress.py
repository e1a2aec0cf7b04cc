"""Progress of a benchmark on standard error: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """Steps done of those planned, and the time left, estimated from the steps that took time."""

    def __init__(self, name: str, plan: int) -> None:
        self._name, self._plan, self._done = name, plan, 0
        self._seconds: list[float] = []
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def start(self) -> None:
        """Begin to show it."""
        if sys.stderr.isatty():
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
                transient=True,
                auto_refresh=False,  # it would draw from another thread during measurements
            )
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._plan, left="")

    def stop(self) -> None:
        """Stop showing it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, step: str) -> None:
        """A step is about to be measured."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._name}: {step}", refresh=True)

    def advance(self, step: str, seconds: float) -> None:
        """A step is done; `seconds` is 0 if an earlier run measured it."""
        self._done += 1
        self._plan = max(self._plan, self._done)
        if seconds:
            self._seconds.append(seconds)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, total=self._plan, left=self.left(), refresh=True)
        else:
            took = f"{seconds:.1f} s" if seconds else "measured before"
            self.say(f"{self._name} {self._done}/{self._plan}: {step}: {took}; {self.left()}")

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
