"""Child processes end with the block that they run in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from embedctl.common import processes
from embedctl.common.processes import running


def test_a_child_is_stopped_whatever_ends_the_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), running(["sleep", "100"]) as child:
        raise ZeroDivisionError
    assert child.returncode == -15
    with running(["sh", "-c", "exit 3"]) as child:
        child.wait()
    assert child.returncode == 3


def test_one_that_does_not_listen_is_killed_and_what_it_has_not_read_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_STOP_S", 0.1)
    command = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.02; done"]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("unread")
    assert child.returncode == -9
    assert child.stdin.closed
