"""`embedctl status` without a job, and `--watch` on a pseudo-terminal, with real workers."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from embedctl import enqueue_embeddings
from embedctl.broker import Broker
from embedctl.overview import Gatherer
from embedctl.terminal.watch import Feed
from embedctl_config.settings import Settings
from tests.support.processes import RunEmbedctl
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

COLUMNS, ROWS = 80, 24
ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"
CURSOR = "\x1b[?25h"
BAR = re.compile(r"progress   [━╸─]{16}  \d+%  [\d,]+ rec/s  [\d,]+ tokens/s  \d+ s left")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A program on a pseudo-terminal of 80 × 24."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._main, self._side = pty.openpty()
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.modes = termios.tcgetattr(self._side)
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "embedctl", *arguments],
            env={**environment, "TERM": "xterm-256color"},
            stdin=self._side,
            stdout=self._side,
            stderr=self._side,
            start_new_session=True,
            # Ctrl-C is a signal only to those whose terminal it is typed at.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def read(self, seconds: float) -> None:
        """Take what it prints in that time, or until it prints."""
        ready, _, _ = select.select([self._main], [], [], seconds)
        if ready:
            self.text += os.read(self._main, 1 << 16).decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def until(self, condition: Callable[[], object]) -> None:
        def met() -> bool:
            self.read(0.1)
            return bool(condition())

        eventually(met, show=lambda: self.text[-3000:])

    def ended(self) -> int:
        """Its exit status, once it has ended and all that it printed is read."""
        self.until(lambda: self.process.poll() is not None)
        self.read(0.1)
        return self.process.returncode

    def frames(self) -> list[list[str]]:
        """Every whole screen that was drawn, as lines without colours."""
        frames = self.text.partition(ALTERNATE)[2].partition(NORMAL)[0].split("\x1b[H")[1:]
        whole = frames if NORMAL in self.text else frames[:-1]
        plain = (ESCAPES.sub("", frame) for frame in whole)
        return [[line.rstrip() for line in frame.splitlines()] for frame in plain if frame]

    def is_as_before(self) -> bool:
        """Whether the normal screen is back, with a cursor, an echo and lines."""
        after = self.text.rpartition(ALTERNATE)[2]
        return NORMAL in after and CURSOR in after and termios.tcgetattr(self._side) == self.modes

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._side)


@contextmanager
def terminal(arguments: list[str], environment: dict[str, str]) -> Iterator[Terminal]:
    opened = Terminal(arguments, environment)
    try:
        yield opened
    finally:
        opened.close()


def filled(frames: list[list[str]], job_id: str) -> list[int]:
    """How much of a job's bar was filled in each frame that showed it at work."""
    return [line.count("━") for frame in frames for line in frame if line.startswith(job_id) and "─" in line]


def test_watch_shows_a_job_at_work_until_it_is_left(
    environment: dict[str, str], settings: Settings, start_worker: StartWorker
) -> None:
    worker = start_worker("slow")
    texts = [f"secret {i} " + "word " * 60 for i in range(200)]
    job = enqueue_embeddings(texts, hardware="slow", chunk_size=5, settings=settings)
    waiting = enqueue_embeddings(["one"], hardware="dummy", settings=settings)
    with terminal(["status", "--watch"], environment) as screen:
        screen.until(lambda: len(set(filled(screen.frames(), job.id))) >= 2)
        with terminal(["status", job.id, "--watch"], environment) as one:
            one.until(lambda: any(BAR.fullmatch(line) for frame in one.frames() for line in frame))
            job.cancel()
            assert one.ended() == 0
            assert one.is_as_before()
            # What was drawn is gone with its screen; how the job ended stays.
            assert "state      cancelled" in one.text.rpartition(NORMAL)[2]
        screen.until(lambda: any(f"{job.id} cancelled" in line for line in screen.frames()[-1]))
        last = screen.frames()[-1]  # whole: the next one may be cut off by Ctrl-C
        screen.type("\x03")
        assert screen.ended() == 0
        assert screen.is_as_before()
    bars = filled(screen.frames(), job.id)
    assert bars == sorted(bars)
    for frame in screen.frames():
        assert len(frame) <= ROWS
        assert max(map(len, frame)) <= COLUMNS
    assert sum(line.strip().startswith(worker.row().name) for line in last) == 1
    assert "slow dummy · 1 live" in "\n".join(last)
    assert "rows/s" in last[1]
    assert f"{waiting.id} queued" in "\n".join(last)
    assert "  start one: embedctl worker --class dummy --model dummy" in last
    assert "secret" not in screen.text


@pytest.mark.parametrize(("leave", "status"), [("q", 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_terminal_is_restored_however_one_leaves(
    leave: str | signal.Signals, status: int, environment: dict[str, str]
) -> None:
    with terminal(["status", "--watch"], environment) as screen:
        screen.until(lambda: "q leaves" in screen.text)
        assert not screen.is_as_before()
        if isinstance(leave, str):
            # Ctrl-Z, with no shell to go to; then it draws on.
            screen.type("x\x1a")
            screen.until(
                lambda: screen.text.count(ALTERNATE) == 2 and "q leaves" in screen.text.rpartition(ALTERNATE)[2]
            )
            screen.type(leave)
        else:
            screen.process.send_signal(leave)
        assert screen.ended() == status
        assert screen.is_as_before()


def test_without_a_terminal_it_looks_once_or_prints_lines(
    embedctl: RunEmbedctl, environment: dict[str, str], settings: Settings, start_worker: StartWorker
) -> None:
    worker = start_worker()
    job = enqueue_embeddings(["one", "two"], settings=settings)
    job.wait(timeout=60)
    once = embedctl("status")
    assert once.returncode == 0, once.stderr
    lines = once.stdout.splitlines()
    assert lines[0].startswith("workers 1  ")
    assert any(line.strip().startswith(worker.row().name) for line in lines)
    assert any(line.startswith(job.id) and "completed" in line and line.endswith("dummy  dummy") for line in lines)
    assert "\x1b" not in once.stdout

    facts = json.loads(embedctl("status", "--json").stdout)
    assert (facts["live_workers"], facts["active_jobs"], facts["tickets"]) == (1, 0, 0)
    assert [each["name"] for each in facts["workers"]] == [worker.row().name]
    assert [(each["id"], each["state"], each["done"]) for each in facts["jobs"]] == [(job.id, "completed", 2)]
    (queue,) = facts["queues"]
    assert (queue["hardware"], queue["model"], queue["tickets"], queue["workers"]) == ("dummy", "dummy", 0, 1)
    assert (queue["oldest_s"], queue["near_models"]) == (None, [])

    refused = embedctl("status", "--watch")
    assert refused.returncode == 2
    assert "--watch draws on a terminal" in refused.stderr
    ended = embedctl("status", job.id, "--watch", "--json")
    assert [json.loads(line)["state"] for line in ended.stdout.splitlines()] == ["completed"]

    command = [sys.executable, "-m", "embedctl", "status", "--watch", "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as stream:
        assert stream.stdout is not None
        moments = [json.loads(stream.stdout.readline())["at"] for _ in range(2)]
        stream.send_signal(signal.SIGINT)
        assert stream.wait(60) == 0
    assert moments[0] < moments[1]


def test_it_says_since_when_redis_is_away_and_goes_on_when_it_is_back(short_folder: Path) -> None:
    folder = short_folder / "own"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    broker = Broker.connect(Settings(redis_url=server.url))
    try:
        with Feed(Gatherer(broker).look, interval_s=0.1) as feed:
            before = feed.sight()
            server.stop()
            eventually(lambda: feed.sight().trouble)
            away = feed.sight()
            assert "can't be reached" in away.trouble
            assert before.at <= away.at
            server.start()
            eventually(lambda: not feed.sight().trouble)
            assert feed.sight().at > away.at
    finally:
        broker.close()
        with suppress(ProcessLookupError):
            server.stop()


def test_a_redis_that_is_not_there_is_an_error_at_once(embedctl: RunEmbedctl, short_folder: Path) -> None:
    done = embedctl("status", "--watch", "--json", EMBEDCTL_REDIS_URL=f"unix://{short_folder}/nothing.sock")
    assert (done.returncode, done.stdout) == (69, "")
    assert "can't be reached" in done.stderr
