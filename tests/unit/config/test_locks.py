"""Locks of files: one process at a time, and none that a killed process leaves behind."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from embedctl_config.durable import locked


def test_another_holder_is_refused_until_the_first_one_is_done(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with locked(lock), pytest.raises(BlockingIOError, match=str(lock)), locked(lock):
        pass
    with locked(lock, vanishes=True):
        assert lock.exists()
    assert not lock.exists()


def test_one_that_waits_says_for_what_and_then_holds_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / "lock"
    seen: list[str] = []

    def second() -> None:
        with locked(lock, holder="writes the file"):
            seen.append("second")

    with caplog.at_level(logging.INFO), locked(lock, vanishes=True):
        waiting = threading.Thread(target=second)
        waiting.start()
        while "another process writes the file: waiting for it" not in caplog.text:
            pass
        seen.append("first")
    waiting.join()
    assert seen == ["first", "second"]
    assert lock.exists(), "the one that vanished with its holder is not the one that is held now"


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    def killed() -> None:
        with locked(tmp_path / "lock"):
            os._exit(9)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join()
    with locked(tmp_path / "lock"):
        assert child.exitcode == 9
