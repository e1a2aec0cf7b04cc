"""Worker processes and the names of models: several models in one worker, and two spellings of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embedctl import JobState, enqueue_embeddings
from embedctl.broker import Broker
from embedctl_config.settings import Settings
from tests.support.forked import Forked
from tests.support.redis_server import as_user
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, WorkerProcess


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


@pytest.mark.slow
def test_both_spellings_of_a_model_reach_a_worker_of_either(
    environment: dict[str, str], settings: Settings, start_worker: StartWorker, tiny_model: Callable[..., Path]
) -> None:
    pytest.importorskip("torch")
    from tests.support.tiny_models import Tiny

    names = ("tiny", "sentence-transformers/tiny")
    with Path(environment["EMBEDCTL_CONFIG"]).open("a") as config:
        for name in names:
            config.write(f'\n[models."{name}"]\nsource = "{tiny_model(Tiny())}"\n')
    for started in names[1:]:
        before = [enqueue_embeddings(["early"], model=name, hardware="cpu", settings=settings) for name in names]
        worker = start_worker("cpu", model=started)
        assert set(worker.row().models) == set(names)
        assert set(worker.row().loaded) == {started}
        after = [enqueue_embeddings(["late"], model=name, hardware="auto", settings=settings) for name in names]
        for job in (*before, *after):
            status = job.wait(timeout=60)
            assert (status.state, status.hardware) == (JobState.COMPLETED, "cpu")
        assert worker.stop() == 0
        assert len(worker.log().split("ready in")) == 2
