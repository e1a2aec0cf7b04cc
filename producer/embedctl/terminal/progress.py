"""Progress for people, on standard error, while a job is submitted and while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from embedctl.notices import Reminder
from embedctl.rates import Rate
from embedctl.routing import missing_worker
from embedctl.store import JobStatus
from embedctl.terminal.job_facts import stalled
from embedctl_config.printable import printable

#: Without a terminal, a line is printed this often (seconds).
_LINE_EVERY_S = 10.0


class JobProgress:
    """A progress bar on a terminal unless `bar` is false, a line now and then elsewhere, nothing if `quiet`."""

    def __init__(self, *, quiet: bool = False, bar: bool = True) -> None:
        self._with_bar = bar
        self._console = Console(stderr=True, quiet=quiet)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._rate = Rate()
        self._next_line = time.monotonic() + _LINE_EVERY_S
        self._remind = Reminder(self.say)
        self._waits_for = ""
        self._said: set[str] = set()
        #: Records that were done before this command first saw the job; None if there were none.
        self.continued_at: int | None = None
        self._seen = False
        #: Called with each status of a job that has not ended; raises if waiting is of no use any more.
        self.watch: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        if self._with_bar and sys.stderr.isatty() and not self._console.quiet:
            self._bar = Progress(
                TextColumn("{task.description:<10}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("submitting", total=None, rate="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(printable(line), soft_wrap=True, highlight=False, markup=False)

    def _say_once(self, topic: str, line: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            self.say(line)

    def submitting(self, records: int, waiting_for: str) -> None:
        """Records were added, or the producer waits for something."""
        if self._bar is not None:
            self._bar.update(self._task, completed=records, rate=f"waiting for {waiting_for}" if waiting_for else "")
        elif waiting_for and waiting_for != self._waits_for:
            self.say(f"{records:,} records submitted; waiting for {waiting_for}")
        self._waits_for = waiting_for or self._waits_for

    def running(self, job: JobStatus) -> None:
        """The job's status at this moment."""
        if not job.state.ended:
            self.watch()
        ended = job.done + job.failed
        if not self._seen:
            self._seen = True
            self.continued_at = ended if ended and not job.state.ended else None
        rates = self._rate.add(time.monotonic(), ended, job.tokens)
        rate = "" if rates is None else f"{rates[0]:,.0f} rec/s {rates[1]:,.0f} tok/s"
        self._remind(missing_worker(job))
        if job.mismatch:
            self._say_once(
                "mismatch",
                f"A worker with other weights was refused: {job.mismatch}; the job is pinned to {job.pinned_by}",
            )
        if job.stalled:
            self._say_once("stalled", stalled(job))
        if self._bar is not None:
            self._bar.update(
                self._task, description=job.state.partition("_")[0], completed=ended, total=job.records, rate=rate
            )
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            self.say(f"{job.state}: {ended} of {job.records} records {rate}")
