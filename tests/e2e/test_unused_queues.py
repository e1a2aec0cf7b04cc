"""A job of a misspelt model leaves no queue, and a later job of that name finds none of its tickets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis as redis_py

from embedctl_config import keys
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

Embedctl = Callable[..., subprocess.CompletedProcess[str]]
QUEUE = keys.queue("dummy", "typo-model")


def submitted(embedctl: Embedctl, folder: Path) -> str:
    corpus = folder / "corpus.txt"
    corpus.write_text("one\ntwo\nthree\nfour\n")
    done = embedctl("submit", str(corpus), "--model", "typo-model", "--class", "dummy", "--chunk-size", "1")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def left(raw: redis_py.Redis) -> list[bytes]:
    """What is left of the queue: its list, and Kombu's bindings."""
    return [name for name in raw.scan_iter(match=f"*{QUEUE}*") if not name.startswith(b"embed:")]


def test_a_discarded_job_of_a_misspelt_model_leaves_nothing_that_a_later_one_finds(
    embedctl: Embedctl, raw: redis_py.Redis, short_folder: Path, start_worker: StartWorker
) -> None:
    first = submitted(embedctl, short_folder)
    assert raw.llen(QUEUE) == 4
    assert embedctl("discard", first).returncode == 0
    assert left(raw) == []

    later = submitted(embedctl, short_folder)
    overview = json.loads(embedctl("status", "--json").stdout)
    (queue,) = (each for each in overview["queues"] if each["model"] == "typo-model")
    assert queue["tickets"] == 4
    start_worker(model="typo-model")
    done = embedctl("wait", later, "--timeout", "120")
    assert done.returncode == 0, done.stderr
    status = json.loads(embedctl("status", later, "--json").stdout)
    assert status["state"] == "completed"
    assert status["claims"] == 4


@pytest.mark.parametrize("late", [False, True])
def test_the_reaper_of_another_queues_worker_removes_it(
    embedctl: Embedctl, raw: redis_py.Redis, short_folder: Path, start_worker: StartWorker, late: bool
) -> None:
    """Also if the tickets come only after the end of their job."""
    start_worker()
    job_id = submitted(embedctl, short_folder)
    tickets = raw.lrange(QUEUE, 0, -1)
    assert embedctl("discard" if late else "cancel", job_id).returncode == 0
    if late:
        raw.lpush(QUEUE, *tickets)
    eventually(lambda: not left(raw))
