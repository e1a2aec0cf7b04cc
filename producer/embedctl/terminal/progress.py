"""Progress for people, on standard error, while a job is submitted, while it runs and while its vectors are written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from embedctl.common.notices import Reminder
from embedctl.common.rates import Rate, seconds_left
from embedctl.destinations.loop import Callbacks, RefusedRecord
from embedctl.queueing.routing import missing_worker
from embedctl.store import JobStatus
from embedctl.terminal.columns import cut, plain
from embedctl.terminal.drawing import bar, duration, number
from embedctl.terminal.job_facts import stalled
from embedctl.waiting.overview import JobPace, Paces
from embedctl.waiting.results import ChunkVectors
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.printable import printable
from embedctl_config.record_ids import as_text

if TYPE_CHECKING:
    from embedctl.terminal.columns import BottomLine

#: Without a terminal, a line is printed this often (seconds).
_LINE_EVERY_S = 10.0
#: A job that waits for its reader this long probably has none (ms).
_RESTS_MS = 30_000

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SPINS_PER_S = 10
_LEAST_BAR, _MOST_BAR = 5, 40
#: Facts of a higher rank are left out first where there is no room; those of rank 0 always stay.
_BAR_RANK, _MOST_RANK = 3, 4


@dataclass(frozen=True, slots=True)
class Activity:
    """What a command does at this moment, in one word. Counts are of records. `total` is None if it is unknown, and may
    be `growing`. `written` are in the file, where `done` does not count these. `since` is when it began, by the
    monotonic clock, if it has no count."""

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


class JobProgress:
    """A line that moves on a terminal, if it may, a line now and then elsewhere, nothing if `quiet`.

    Attributes:
        now_ms: the time by Redis' clock (milliseconds); by this host's until a command sets it.
        watch: called while a job has not ended, and while its producer waits; raises if waiting is of no use any more.
        resumed_at: records that were done before this command resumed the job; None if it resumed none.
        writing: what this command writes; None if it writes nothing.
    """

    def __init__(self, *, quiet: bool = False, moving: bool = True) -> None:
        self._moving = moving
        self.now_ms: Callable[[], int] = _host_ms
        self.watch: Callable[[], None] = lambda: None
        self.resumed_at: int | None = None
        self._console = Console(stderr=True, quiet=quiet)
        self._line: BottomLine | None = None
        self._now = Activity("starting", since=time.monotonic())
        self._next_words = time.monotonic() + _LINE_EVERY_S
        self._remind = Reminder(self.say)
        self._waits_for = ""
        self._said: set[str] = set()
        self._submitted = Rate()
        self._submitted_to = False
        self._paces = Paces()
        self._pace: JobPace | None = None
        self.writing: Writing | None = None

    def __enter__(self) -> Self:
        terminal = sys.stderr.isatty() and not self._console.quiet and not self._console.is_dumb_terminal
        if self._moving and terminal:
            # Imported only here, because most commands never draw.
            from embedctl.terminal.columns import BottomLine

            self._line = BottomLine(self._console, lambda width: progress_line(self._now, width))
            self._line.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._line is not None:
            # Of a job that has ended, the command says more than this line does.
            ended = self._pace is not None and self._pace.job.state.ended
            self._line.end(keep=self._now.since is None and (error is not None or not ended))
            self._line = None

    @contextmanager
    def above(self) -> Iterator[None]:
        """What the block prints on standard output stands above the moving line, if there is one."""
        with nullcontext() if self._line is None else self._line.above():
            yield

    def say(self, line: str, *, prose: bool = False) -> None:
        """Print a line, above the moving one if there is one. On a terminal, a line of `prose` may end between two
        words; what users copy must stay whole."""
        ends_anywhere = not (prose and self._console.is_terminal)
        self._console.print(printable(line), soft_wrap=ends_anywhere, highlight=False, markup=False)

    def _say_once(self, topic: str, line: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            self.say(line)

    def loading(self, line: str) -> None:
        """A worker is being started; the line says with what."""
        self.say(line)
        self._now = Activity("loading", since=time.monotonic())

    def begun(self, job: JobStatus) -> None:
        """The job that records are submitted to, before any is added."""
        done = job.done + job.failed
        self.resumed_at = done if done and not job.state.ended else None
        self._submitted_to = not job.state.ended

    def submitting(self, records: int, waiting_for: str) -> None:
        if waiting_for:
            self.watch()
        lately = self._submitted.add(time.monotonic(), records)
        # What else it says stands in the log, which is above the line.
        short = waiting_for.partition(". ")[0]
        self._now = Activity("submitting", records, records_per_s=lately[0] if lately else None, waits_for=short)
        if self._line is None and short and short != self._waits_for:
            self.say(f"{records:,} records submitted; waiting for {short}")
        self._waits_for = short or self._waits_for

    def submitted(self) -> None:
        self._now = Activity("submitted", self._now.done)

    @property
    def callbacks(self) -> Callbacks:
        """What tells of a delivery here."""
        return Callbacks(self.running, self.written, self.refused)

    def running(self, job: JobStatus) -> None:
        if not job.state.ended:
            self.watch()
        (self._pace,) = self._paces.of([job], self._redis_ms())
        if self.writing is not None:
            # A small job may have ended before anything is written; its submitter asks how fast it was encoded.
            ended = job.state.ended and not self._submitted_to
            self.writing.alone = ended if self.writing.alone is None else self.writing.alone
        self._remind(missing_worker(job))
        if job.stalled:
            self._say_once("stalled", stalled(job))
        rested_ms = self._redis_ms() - job.progressed_at.timestamp() * 1000
        if job.waits_for_reader and self.writing is None and rested_ms > _RESTS_MS:
            self._say_once("reader", f"The job waits for a reader: embedctl fetch {job.id} -o DIR/")
        self._tell(self._pace)

    def begin_writing(self) -> None:
        """From now on, the command writes the job's vectors as they come."""
        self.writing = Writing()

    def written(self, chunk: ChunkVectors) -> None:
        """A chunk's records are in the file, and all before them."""
        if self.writing is not None and self._pace is not None and len(chunk.positions):
            self.writing.add(int(chunk.positions[0]), int(chunk.positions[-1]) + 1)
            self._tell(self._pace)

    def refused(self, record: RefusedRecord) -> None:
        name = "" if record.id is None else f" ({as_text(record.id)})"
        self.say(f"record {record.position}{name}: refused: {record.reason}")

    def stopping(self) -> None:
        """Nothing is left to do but to stop the worker."""
        self._now = Activity("stopping", since=time.monotonic())

    def _tell(self, pace: JobPace) -> None:
        self._now = _activity(pace, self.writing)
        over = pace.job.state.ended and self._now.done == pace.job.records
        if self._line is None and not over and time.monotonic() >= self._next_words:
            self._next_words = time.monotonic() + _LINE_EVERY_S
            self.say(progress_words(self._now))

    def _redis_ms(self) -> int:
        try:
            return self.now_ms()
        except BrokerUnavailable:  # the request for the job's status waits for Redis
            return _host_ms()


class Writing:
    """How many records of a job are in a file, those of an earlier fetch included, and how fast they come: per second
    lately, None without growth, and on `average` over the `seconds` from the beginning to the last record. `alone` says
    whether the job had ended before this command; None until its status is known."""

    def __init__(self) -> None:
        self.alone: bool | None = None
        self.records = 0
        self.records_per_s: float | None = None
        self.seconds = self.average = 0.0
        self._began = time.monotonic()
        self._earlier: int | None = None
        self._rate = Rate()

    def add(self, before: int, records: int) -> None:
        """So many records were in the file, and so many are now."""
        now = time.monotonic()
        if self._earlier is None:
            self._earlier = before
        self.records, self.seconds = records, max(1e-3, now - self._began)
        self.average = (records - self._earlier) / self.seconds
        lately = self._rate.add(now, records)
        self.records_per_s = lately[0] if lately else None


def _activity(pace: JobPace, writing: Writing | None) -> Activity:
    """What is going on with a job: it is encoded, its vectors are written, or both."""
    job = pace.job
    if writing is None:
        written, left_s = None, pace.seconds_left
    else:
        written = writing.records
        writing_left_s = seconds_left(job.records - written, writing.records_per_s)
        if job.state.ended:
            speed = writing.records_per_s
            return Activity("writing", written, job.records, records_per_s=speed, seconds_left=writing_left_s)
        # Both go on at once, so the slower of them decides.
        left_s = None if pace.seconds_left is None else max(pace.seconds_left, writing_left_s or 0.0)
    return Activity(
        job.state.partition("_")[0],
        pace.finished,
        job.records,
        growing=not job.sealed and not job.state.ended,
        written=written,
        records_per_s=pace.records_per_s,
        tokens_per_s=pace.tokens_per_s,
        seconds_left=left_s,
    )


def _host_ms() -> int:
    return time.time_ns() // 1_000_000


def progress_line(now: Activity, width: int) -> Text:
    """A line of at most so many cells with a bar, or with something that moves; what matters least is left out of a
    narrow one."""
    head = f"{now.what:<10} "
    if now.since is not None:
        spinner = _SPINNER[int(time.monotonic() * _SPINS_PER_S) % len(_SPINNER)]
        return cut(plain(f"{head}{spinner} {time.monotonic() - now.since:.0f} s"), width)
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
    """Each fact and its rank; `of` stands between the number done and the total."""
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
