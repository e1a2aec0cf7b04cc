"""The line that shows a command's progress, at every width, in a log, and by what it reckons."""

from __future__ import annotations

import errno
import io
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyte
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from embedctl.cli import results
from embedctl.store import JobStatus
from embedctl.terminal.columns import BottomLine
from embedctl.terminal.progress import Activity, JobProgress, progress_line
from embedctl.waiting.results import ChunkVectors
from tests.support.jobs import status_of

JOB = "20261122-104638-04e2b4654b"
NOW_MS = 1_795_000_000_000
RUNNING = Activity("running", 3_584, 12_000, records_per_s=277.0, tokens_per_s=14_474.0, seconds_left=29.0)
LARGEST = Activity(
    "completed",
    123_456_789,
    123_456_789,
    growing=True,
    written=123_456_789,
    records_per_s=99_999.0,
    seconds_left=5_900.0,
)


def job(done: int = 0, failed: int = 0, **facts: Any) -> JobStatus:
    found = status_of(JOB, NOW_MS, done=done, failed=failed, tokens=10 * done, **facts)
    return replace(found, live_workers=1)


def chunk(first: int, rows: int = 100) -> ChunkVectors:
    return ChunkVectors(np.arange(first, first + rows), [None] * rows, np.zeros((rows, 2), np.float32), [], [])


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass for all that looks at the monotonic clock."""
    now = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def passes(by: float) -> None:
        now[0] += by

    return passes


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "now",
    [
        RUNNING,
        LARGEST,
        replace(RUNNING, written=3_072),
        Activity("submitting", 8_704, records_per_s=100_000.0, waits_for="workers to make room"),
        Activity("queued", 0, 0),
        Activity("loading", since=0.0),
    ],
)
def test_no_line_is_wider_than_its_terminal(now: Activity) -> None:
    for width in range(1, 130):
        assert cell_len(progress_line(now, width).plain) <= width


def test_a_log_gets_all_now_and_then(capsys: pytest.CaptureFixture[str], seconds: Callable[[float], None]) -> None:
    shown = JobProgress()
    shown.running(job(100))
    assert words(capsys) == ""
    seconds(10.0)
    shown.running(job(200))
    assert words(capsys) == "running: 200 of 1,000 records, 10 records/s, 100 tokens/s, 80 s left\n"
    shown.running(job(210))
    assert words(capsys) == ""


def test_writing_goes_on_where_it_was(capsys: pytest.CaptureFixture[str], seconds: Callable[[float], None]) -> None:
    ended = job(999, failed=1, state="completed_with_errors", ended_ms=NOW_MS, dim=2)
    shown = JobProgress()
    shown.begin_writing()
    shown.running(ended)
    assert (shown._now.what, shown._now.done, shown._now.seconds_left) == ("writing", 0, None)
    seconds(1.0)
    for first in (500, 600, 700):
        shown.written(chunk(first))
        seconds(2.0)
    assert shown._now == Activity("writing", 800, 1_000, records_per_s=50.0, seconds_left=4.0)
    for first in (800, 900):
        shown.written(chunk(first))
    shown.running(ended)
    results.report(ended, shown)
    assert words(capsys) == (
        "999 vectors of 2 dimensions; 1 failed, 0 truncated; written in 7.0 s, 71 records/s\n"
        f"The failed records: embedctl errors {JOB}\n"
    )


class Screen(io.StringIO):
    """A terminal that takes all that is written."""

    def isatty(self) -> bool:
        return True


class Gone(Screen):
    """A terminal that somebody closed."""

    def write(self, _: str, /) -> int:
        raise OSError(errno.EIO, "the terminal is gone")


@pytest.fixture
def line_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Screen], BottomLine]:
    """Begins a line on a terminal."""
    monkeypatch.setenv("TERM", "xterm-256color")

    def begun(screen: Screen) -> BottomLine:
        monkeypatch.setattr(sys, "stderr", screen)
        line = BottomLine(Console(stderr=True), lambda _: Text("moving"))
        line.start()
        return line

    return begun


def test_what_is_written_above_the_line_stays_whole_to_be_copied(line_on: Callable[[Screen], BottomLine]) -> None:
    terminal = Screen()
    line = line_on(terminal)
    command = "embedctl " + "fetch " * 100
    print(command, file=sys.stderr)
    with line.above():
        terminal.write("printed\n")
    line.end(keep=False)
    assert f"{command}\n" in terminal.getvalue()
    screen = pyte.Screen(80, 10)
    pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
    assert "".join(screen.display).split() == [*command.split(), "printed"]


def test_a_terminal_that_is_gone_does_not_end_the_work(line_on: Callable[[Screen], BottomLine]) -> None:
    line = line_on(Gone())
    line.refresh()
    print("said", file=sys.stderr)
    line.end(keep=True)
