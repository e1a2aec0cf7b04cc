"""What `run` and `up` start on this machine, and what becomes of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from embedctl.operating import local
from embedctl.queueing.broker import Broker
from embedctl_config import keys
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.processes import children, command_line
from tests.support.store import row
from tests.support.terminal import terminal
from tests.support.waiting import PATIENCE_S, eventually

UP = ["up", "--class", "dummy", "--model", "dummy"]
RUN = ["run", "c.txt", "-o", "out.npy", "--model", "dummy"]
SLOW = [f"text {i} " + "word " * 60 for i in range(60)]


def test_up_keeps_a_stack_running_for_other_commands_and_stays_quiet(here: Here) -> None:
    (here.folder / "c.txt").write_text("one\ntwo\n")
    own = {**here.environment, "EMBEDCTL_REDIS_URL": ""}
    with terminal(UP, own, here.folder, columns=200) as up:
        up.until(lambda: re.search(r"export EMBEDCTL_REDIS_URL=unix://\S+\r\n", up.text))
        before, _, after = up.text.partition("export EMBEDCTL_REDIS_URL=")
        url = after.split()[0]
        assert "In another terminal: the line below" in before
        here.embedctl("submit", "c.txt", "-o", "out.npy", EMBEDCTL_REDIS_URL=url, status=0)
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == 0
    assert "ready after" in up.text
    for noise in ("received", "succeeded", "SecurityWarning"):
        assert noise not in up.text
    assert not Path(url.removeprefix("unix://")).exists()


@pytest.mark.slow
def test_a_run_whose_worker_dies_says_so_and_resumes_when_run_again(here: Here) -> None:
    (here.folder / "c.txt").write_text("\n".join(SLOW))
    command = [*RUN, "--class", "slow"]
    here.environment.update(EMBEDCTL_REDIS_URL="", EMBEDCTL_CHUNK_SIZE="5")
    run = Forked(command, here.environment, here.folder)
    eventually(lambda: (here.folder / ".out.npy.part").exists())
    [worker] = [pid for pid in children(run.pid) if b"embedctl_workers" in command_line(pid)]
    os.kill(worker, signal.SIGKILL)
    _, told = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1
    assert "the worker ended with status -9" in told
    here.embedctl(*command, status=0)
    np.testing.assert_array_equal(np.load(here.folder / "out.npy"), reference(SLOW))


def test_a_run_uses_the_live_worker_of_a_given_redis_unless_it_is_told_cpus(here: Here) -> None:
    (here.folder / "c.txt").write_text("one\ntwo\n")
    worker = here.start_worker()
    done = here.embedctl(*RUN, "--class", "dummy", status=0)
    assert f"Encoded by live workers of this Redis: {worker.row().name}" in done.stderr
    assert "Loading" not in done.stderr
    np.testing.assert_array_equal(np.load(here.folder / "out.npy"), reference(["one", "two"]))
    assert "Loading dummy" in here.embedctl(*RUN, "--class", "dummy", "--cpus", "0", status=0).stderr


def test_a_worker_that_is_not_heard_of_for_a_moment_stays_borrowed(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Redis was away for longer than heartbeats last."""
    monkeypatch.setattr(local, "_LOOK_EVERY_S", 0.0)
    clock = iter(float(second) for second in range(1000))
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    broker = Broker.connect(here.settings)
    broker.workers.beat(row())
    started: list[str] = []

    @contextmanager
    def start() -> Iterator[Callable[[], None]]:
        started.append("own")
        yield lambda: None

    said: list[str] = []
    with local.borrowed_worker(here.settings, hardware="dummy", model="dummy", start=start, say=said.append) as watch:
        for _ in range(10):
            here.raw.delete(keys.WORKERS, keys.queue_workers(keys.queue("dummy", "dummy")))
            watch()
            broker.workers.beat(row())
            watch()
        assert started == []
        here.raw.delete(keys.queue_workers(keys.queue("dummy", "dummy")))
        for _ in range(10):
            watch()
        assert started == ["own"]
    broker.close()


@pytest.mark.slow
def test_a_run_says_that_a_given_redis_is_full_and_goes_on_once_there_is_room(here: Here) -> None:
    (here.folder / "c.txt").write_text("one\ntwo\n")
    told = here.folder / "told"
    here.raw.config_set("maxmemory", 1)
    run = Forked([*RUN, "--class", "dummy"], here.environment, here.folder, err=told)
    try:
        eventually(lambda: "Redis is full" in told.read_text())
        here.raw.config_set("maxmemory", 0)
        assert run.wait(PATIENCE_S) == 0, told.read_text()
    finally:
        here.raw.config_set("maxmemory", 0)
        run.kill()
        run.wait()
    assert told.read_text().count("Redis is full") == 1
    np.testing.assert_array_equal(np.load(here.folder / "out.npy"), reference(["one", "two"]))


@pytest.mark.slow
def test_a_run_whose_borrowed_worker_is_killed_starts_its_own(here: Here) -> None:
    """While it submits and waits for room."""
    (here.folder / "c.txt").write_text("\n".join(SLOW))
    worker = here.start_worker("slow")
    own = {**here.environment, "EMBEDCTL_CHUNK_SIZE": "5", "LIMIT_HIGH_WATER_BYTES": "1024"}
    command = [*RUN, "--class", "slow"]
    run = Forked(command, own, here.folder)
    try:
        eventually(lambda: worker.row().holding)
        assert len(children(run.pid)) == 0
        worker.kill()
        _, told = run.communicate(timeout=PATIENCE_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, told
    assert "No live worker serves dummy on slow any more: this command starts one" in told
    np.testing.assert_array_equal(np.load(here.folder / "out.npy"), reference(SLOW))
