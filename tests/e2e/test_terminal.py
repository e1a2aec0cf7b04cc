"""What stands on a real terminal: a job at work, `--watch`, the progress of commands; and what goes into pipes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from embedctl import enqueue_embeddings
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.terminal import COLUMNS, ROWS, Terminal, terminal
from tests.support.waiting import PATIENCE_S, eventually

ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"
CURSOR = "\x1b[?25h"
BAR = re.compile(r"progress   [━╸─]{16}  \d+%  [\d,.k]+ records/s  [\d,.k]+ tokens/s  \d+ s left")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def frames(screen: Terminal) -> list[list[str]]:
    """Every whole screen that was drawn, as lines without colours."""
    drawn = screen.text.partition(ALTERNATE)[2].partition(NORMAL)[0].split("\x1b[H")[1:]
    whole = drawn if NORMAL in screen.text else drawn[:-1]
    plain = (ESCAPES.sub("", frame) for frame in whole)
    return [[line.rstrip() for line in frame.splitlines()] for frame in plain if frame]


def is_as_before(screen: Terminal) -> bool:
    """Whether the normal screen is back, with a cursor, an echo and lines."""
    after = screen.text.rpartition(ALTERNATE)[2]
    return NORMAL in after and CURSOR in after and termios.tcgetattr(screen.side) == screen.modes


def filled(drawn: list[list[str]], job_id: str) -> list[int]:
    """How much of a job's bar was filled in each frame that showed it at work."""
    return [line.count("━") for frame in drawn for line in frame if line.startswith(job_id) and "─" in line]


@pytest.mark.slow
def test_watch_shows_a_job_at_work_until_it_is_left(here: Here) -> None:
    worker = here.start_worker("slow")
    texts = [f"secret {i} " + "word " * 60 for i in range(200)]
    job = enqueue_embeddings(texts, hardware="slow", chunk_size=5, settings=here.settings)
    waiting = enqueue_embeddings(["one"], hardware="dummy", settings=here.settings)
    with terminal(["status", "--watch"], here.environment) as screen:
        screen.until(lambda: len(set(filled(frames(screen), job.id))) >= 2)
        with terminal(["status", job.id, "--watch"], here.environment) as one:
            one.until(lambda: any(BAR.fullmatch(line) for frame in frames(one) for line in frame))
            job.cancel()
            assert one.ended() == 0
            assert is_as_before(one)
            # What was drawn is gone with its screen; how the job ended stays.
            assert "state      cancelled" in one.text.rpartition(NORMAL)[2]
        screen.until(lambda: any(f"{job.id} cancelled" in line for line in frames(screen)[-1]))
        last = frames(screen)[-1]  # whole: the next one may be cut off by Ctrl-C
        screen.type("\x03")
        assert screen.ended() == 0
        assert is_as_before(screen)
    bars = filled(frames(screen), job.id)
    assert bars == sorted(bars)
    for frame in frames(screen):
        assert len(frame) <= ROWS
        assert max(map(len, frame)) <= COLUMNS
    assert sum(line.strip().startswith(worker.row().name) for line in last) == 1
    assert "slow dummy · 1 live" in "\n".join(last)
    assert "records/s" in last[1]
    assert f"{waiting.id} queued" in "\n".join(last)
    assert "  start one: embedctl worker --class dummy --model dummy" in last
    assert "secret" not in screen.text


@pytest.mark.parametrize(("leave", "status"), [("q", 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_terminal_is_always_restored(leave: str | signal.Signals, status: int, environment: dict[str, str]) -> None:
    with terminal(["status", "--watch"], environment) as screen:
        screen.until(lambda: "q leaves" in screen.text)
        assert not is_as_before(screen)
        if isinstance(leave, str):
            screen.type("x\x1a")  # Ctrl-Z does nothing
            screen.type(leave)
        else:
            screen.process.send_signal(leave)
        assert screen.ended() == status
        assert is_as_before(screen)


def test_without_a_terminal_it_looks_once_or_prints_lines(here: Here) -> None:
    worker = here.start_worker()
    job = enqueue_embeddings(["one", "two"], settings=here.settings)
    job.wait(timeout=60)
    once = here.embedctl("status", status=0)
    lines = once.stdout.splitlines()
    assert lines[0].startswith("workers 1  ")
    assert any(line.strip().startswith(worker.row().name) for line in lines)
    assert any(line.startswith(job.id) and "completed" in line and line.endswith("dummy  dummy") for line in lines)
    assert "\x1b" not in once.stdout

    facts = json.loads(here.embedctl("status", "--json").stdout)
    assert (facts["live_workers"], facts["active_jobs"], facts["chunks"]) == (1, 0, 0)
    assert [each["name"] for each in facts["workers"]] == [worker.row().name]
    assert [(each["id"], each["state"], each["done"]) for each in facts["jobs"]] == [(job.id, "completed", 2)]

    refused = here.embedctl("status", "--watch", status=2)
    assert "--watch draws on a terminal" in refused.stderr
    ended = here.embedctl("status", job.id, "--watch", "--json")
    assert [json.loads(line)["state"] for line in ended.stdout.splitlines()] == ["completed"]

    with Forked(["status", "--watch", "--json"], here.environment, None, err=subprocess.DEVNULL) as stream:
        assert stream.stdout is not None
        moments = [json.loads(stream.stdout.readline())["at"] for _ in range(2)]
        stream.send_signal(signal.SIGINT)
        assert stream.wait(PATIENCE_S) == 0
    assert moments[0] < moments[1]


JOB = re.compile(r"\d{8}-\d{6}-[0-9a-f]{10}")
LINE = re.compile(
    r"running    [━╸─]{5,40}  (?P<done>\d+)/(?P<all>\d+)  (?P<rate>\d+) records/s  [\d,.k]+ tokens/s  "
    r"(?P<left>\d+) s left"
)
SUMMARY = r"vectors of 16 dimensions; \d failed, 0 truncated; [\d.]+ s, \d+ records/s, [\d,]+ tokens/s"
#: Of the class `slow`, ten a second.
SLOW = [f"text {i} " + "word " * 60 for i in range(20)]
SLOW_OPTIONS = ["--class", "slow", "--chunk-size", "2"]


@pytest.fixture
def corpus(short_folder: Path) -> Path:
    path = short_folder / "c.txt"
    path.write_text("\n".join(SLOW))
    return path


def moving(screen: Terminal) -> list[str]:
    """The lines that move, or once did."""
    words = ("submitting", "submitted", "queued", "running", "writing", "completed", "loading")
    return [line for line in screen.screen if line.startswith(words)]


def next_bar(screen: Terminal) -> re.Match[str]:
    """The facts of the next bar that is drawn at the screen's end."""
    before = screen.text
    screen.until(lambda: screen.text != before and LINE.fullmatch(screen.screen[-1]))
    found = LINE.fullmatch(screen.screen[-1])
    assert found is not None
    return found


@pytest.mark.slow
def test_the_id_stands_whole_above_one_line_whose_time_left_fits_its_rate(here: Here, corpus: Path) -> None:
    here.start_worker("slow")
    corpus.write_text("\n".join(3 * SLOW))
    command = ["submit", corpus.name, "--wait", *SLOW_OPTIONS]
    with terminal(command, here.environment, corpus.parent, columns=80) as screen:
        for _ in range(2):
            facts = next_bar(screen)
            rest, rate = int(facts["all"]) - int(facts["done"]), int(facts["rate"])
            assert rest / (rate + 0.5) - 1 <= int(facts["left"]) <= rest / (rate - 0.5) + 1
            assert len(screen.screen) == 2
            assert screen.cursor_column == 0
        assert screen.ended() == 0
        assert moving(screen) == []
        assert re.search(SUMMARY, " ".join(screen.screen))
        assert JOB.fullmatch(screen.screen[0])


def test_a_narrower_terminal_and_ctrl_c_leave_one_line(here: Here) -> None:
    here.start_worker("slow")
    job = enqueue_embeddings(SLOW * 10, hardware="slow", chunk_size=2, settings=here.settings)
    with terminal(["fetch", job.id, "-o", "out.npy"], here.environment, here.folder, columns=120) as screen:
        screen.until(lambda: "left" in screen.screen[-1])
        screen.resize(50)
        screen.until(lambda: len(screen.screen) == 1 and re.fullmatch(r"running .* s left", screen.screen[0]))
        assert len(screen.screen[0]) < 50
        screen.type("\x03")
        assert screen.ended() == 130
        assert len(moving(screen)) == 1
        assert "^C" not in screen.screen[0]
        assert screen.screen[1].startswith(f"embedctl: interrupted; job {job.id}"[:50])
    job.cancel()


def test_wait_tells_time_and_rate_of_a_job_that_it_found_at_work(here: Here) -> None:
    here.start_worker("slow")
    job = enqueue_embeddings(["", *SLOW[:15]], hardware="slow", chunk_size=2, settings=here.settings)
    eventually(lambda: job.status().done)
    waited = here.embedctl("wait", job.id, status=3)
    assert re.fullmatch(rf"15 {SUMMARY}\nThe failed records: embedctl errors {job.id}\n", waited.stderr)
    assert here.embedctl("wait", job.id, "-q").stderr == ""
