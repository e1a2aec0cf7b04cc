"""Which processes of this machine run: a worker is said to have died on the strength of this."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embedctl.common.machine import machine_id, process_id, runs
from tests.support.processes import process_state
from tests.support.waiting import eventually

StartProcess = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[StartProcess]:
    """Starts a process that waits until its standard input ends, under a command name of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str = "child") -> subprocess.Popen[str]:
        code = f"open('/proc/self/comm', 'w').write({name!r}); print(flush=True); input()"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def started_at(pid: int) -> int:
    return int(process_id(pid).partition(".")[2])


def test_a_process_runs_until_it_is_a_zombie(start: StartProcess) -> None:
    process = start()
    known = process_id(process.pid)
    assert known.startswith(f"{process.pid}.")
    assert runs(known)
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: process_state(process.pid) == "T")
    assert process_id(process.pid) == known
    assert runs(known)
    process.kill()
    eventually(lambda: process_state(process.pid) == "Z")
    assert process_id(process.pid) == ""
    assert not runs(known)


@pytest.mark.parametrize("name", ["a) Z 1 (b", "(("])
def test_a_command_name_may_hold_anything(start: StartProcess, name: str) -> None:
    process = start(name)
    assert f"({name})" in Path(f"/proc/{process.pid}/stat").read_text()
    pid, _, started = process_id(process.pid).partition(".")
    assert int(pid) == process.pid
    assert started_at(os.getpid()) < int(started)
    assert runs(f"{pid}.{started}")


def test_a_process_that_ends_meanwhile_runs_no_more(start: StartProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start()
    known = process_id(process.pid)

    def end_then_read(path: Path, **_: object) -> str:
        with path.open() as file:
            process.kill()
            process.wait()
            return file.read()

    monkeypatch.setattr(Path, "read_text", end_then_read)
    assert not runs(known)


@pytest.mark.parametrize("hidden", [FileNotFoundError, PermissionError])
def test_a_process_that_is_hidden_from_us_is_not_said_to_have_died(
    start: StartProcess, monkeypatch: pytest.MonkeyPatch, hidden: type[OSError]
) -> None:
    """Where /proc is mounted with hidepid, another user's processes are hidden (2) or can't be read (1)."""
    process = start()
    known = process_id(process.pid)

    def refuse(path: Path, **_: object) -> str:
        raise hidden(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert runs(known)


def test_a_worker_that_told_no_process_is_never_said_to_have_died() -> None:
    assert runs("")
    assert machine_id() == machine_id() != ""
