"""What `run` and `up` start on this machine, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl, children, is_running
from tests.support.waiting import eventually

SLOW = [f"text {i} " + "word " * 60 for i in range(60)]


def test_up_keeps_a_stack_running_for_other_commands(
    environment: dict[str, str], embedctl: RunEmbedctl, short_folder: Path
) -> None:
    (short_folder / "c.txt").write_text("one\ntwo\n")
    command = [sys.executable, "-m", "embedctl", "up", "--class", "dummy", "--model", "dummy"]
    own = {**environment, "EMBEDCTL_REDIS_URL": ""}
    up = subprocess.Popen(command, env=own, cwd=short_folder, stdout=subprocess.PIPE, text=True)
    try:
        assert up.stdout
        line = up.stdout.readline()
        assert line.startswith("export EMBEDCTL_REDIS_URL=unix://")
        url = line.strip().partition("=")[2]
        done = embedctl("submit", "c.txt", "-o", "out.npy", EMBEDCTL_REDIS_URL=url)
        assert done.returncode == 0, done.stderr
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
    finally:
        up.kill()  # what it started is told by the kernel
        up.wait()
    assert not Path(url.removeprefix("unix://")).exists()


@pytest.mark.slow
def test_a_run_that_was_killed_leaves_nothing_running_and_goes_on(
    environment: dict[str, str], short_folder: Path
) -> None:
    (short_folder / "c.txt").write_text("\n".join(SLOW))
    command = [sys.executable, "-m", "embedctl", "run", "c.txt", "-o", "out.npy", "--class", "slow", "--model", "dummy"]
    own = {**environment, "EMBEDCTL_REDIS_URL": "", "EMBEDCTL_CHUNK_SIZE": "5"}
    run = subprocess.Popen(command, env=own, cwd=short_folder, stderr=subprocess.DEVNULL)
    eventually(lambda: (short_folder / ".out.npy.progress").exists())
    started = children(run.pid)
    assert len(started) == 2
    run.kill()
    run.wait()
    eventually(lambda: not any(is_running(pid) for pid in started))
    done = subprocess.run(command, env=own, cwd=short_folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference([text.strip() for text in SLOW]))


@pytest.mark.slow
def test_a_run_whose_worker_dies_says_so_and_goes_on_when_run_again(
    environment: dict[str, str], short_folder: Path
) -> None:
    (short_folder / "c.txt").write_text("\n".join(SLOW))
    command = [sys.executable, "-m", "embedctl", "run", "c.txt", "-o", "out.npy", "--class", "slow", "--model", "dummy"]
    own = {**environment, "EMBEDCTL_REDIS_URL": "", "EMBEDCTL_CHUNK_SIZE": "5"}
    run = subprocess.Popen(command, env=own, cwd=short_folder, stderr=subprocess.PIPE, text=True)
    eventually(lambda: (short_folder / ".out.npy.progress").exists())
    started = children(run.pid)
    [worker] = [pid for pid in started if b"embedctl_workers" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(worker, signal.SIGKILL)
    _, told = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "the worker ended with status -9" in told
    done = subprocess.run(command, env=own, cwd=short_folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference(SLOW))
