"""Worker processes and the names of models: several models in one worker, and two spellings of one model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from embedctl import JobState, enqueue_embeddings
from embedctl.broker import Broker
from embedctl_config.settings import Settings
from tests.support.forked import Forked
from tests.support.redis_server import as_user
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess


@pytest.fixture
def worker_of_two(environment: dict[str, str], broker: Broker, short_folder: Path) -> Iterator[WorkerProcess]:
    """A slow worker that serves the models `a` and `b`."""
    log, own = short_folder / "two.log", as_user(environment, "worker")
    log.touch()
    arguments = ["--class", "slow", "--model", "a", "--model", "b"]
    worker = WorkerProcess(Forked(["worker", *arguments], own, short_folder, log, log), broker, log)
    yield worker.wait_ready()
    worker.kill()


def test_a_small_job_is_not_stuck_behind_a_large_one_of_another_model(
    worker_of_two: WorkerProcess, settings: Settings
) -> None:
    for large, small in ("ab", "ba"):
        texts = [f"text {at} " + "word " * 30 for at in range(400)]
        long_one = enqueue_embeddings(texts, model=large, hardware="slow", chunk_size=2, settings=settings)
        eventually(lambda: long_one.status().done)  # noqa: B023  (it is called in this turn)
        short_one = enqueue_embeddings(["a text"], model=small, hardware="slow", settings=settings)
        assert short_one.wait(timeout=120).state is JobState.COMPLETED
        assert not long_one.status().state.ended
        long_one.cancel()
