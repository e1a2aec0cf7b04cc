"""A worker whose backend joins the batches of several chunks: what goes wrong in one costs the others nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import redis as redis_py

from embedctl import Job, JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.jobs import owners, reference
from tests.support.limits import settings_of
from tests.support.processes import before_all_else
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, deaths, kept_alive

#: A dummy on a device of its own, which takes a while for a batch. The log tells the sizes of its batches.
_BACKEND = """
import logging, time
from concurrent.futures import ThreadPoolExecutor
from embedctl_workers.backends.dummy import DummyBackend

class JoiningBackend(DummyBackend):
    OPTIONS = DummyBackend.OPTIONS

    def __init__(self, **options):
        super().__init__(poison=True, **options)
        self.ahead, self.joins, self.budget_by_sum, self.token_budget = 1, True, True, 200
        self.device = ThreadPoolExecutor(1)

    def forward(self, tokens, rows):
        logging.getLogger("embedctl.device").warning("a batch of %d texts", len(rows))
        def compute():
            time.sleep(0.1)
            return DummyBackend.forward(self, tokens, rows)
        return self.device.submit(compute)

    def finish(self, output, *, normalize):
        return super().finish(output.result(), normalize=normalize)
"""
_REGISTERED = """
from embedctl_workers import backends
backends.BACKENDS["joining"] = ("joining:JoiningBackend", "")
"""
_CLASS = """
[classes.joining]
backend = "joining"
prefetch = 6
options = {dim = 16}
"""


@pytest.fixture
def joining(environment: dict[str, str], short_folder: Path) -> Settings:
    """The settings with a class whose workers join batches."""
    config = short_folder / "embedctl.toml"
    config.write_text(config.read_text() + _CLASS)
    environment.update(before_all_else(short_folder, "joining", _REGISTERED, {"joining": _BACKEND}))
    return settings_of(environment)


def submit(settings: Settings, texts: list[str]) -> Job:
    return enqueue_embeddings(texts, hardware="joining", chunk_size=10, settings=settings)


def texts_of(count: int) -> list[str]:
    return [f"text {i}" for i in range(count)]


def test_chunks_are_joined_and_every_record_has_its_vector(joining: Settings, start_worker: StartWorker) -> None:
    worker = start_worker("joining")
    texts = [*texts_of(395), *["text 0"] * 3, "", "x"]
    first, second = submit(joining, texts), submit(joining, texts[:100])
    for job, all_of_it in ((first, texts), (second, texts[:100])):
        status = job.wait(timeout=60)
        good = [at for at, text in enumerate(all_of_it) if text]
        assert (status.done, status.failed) == (len(good), len(all_of_it) - len(good))
        np.testing.assert_array_equal(job.vectors()[good], reference([all_of_it[at] for at in good]))
    sizes = [int(line.split("a batch of ")[1].split()[0]) for line in worker.log().splitlines() if "a batch of" in line]
    assert max(sizes) > 20  # of several chunks
    assert worker.row().models["dummy"].rows_per_s < 10_000


@pytest.mark.slow
def test_a_record_that_kills_a_worker_costs_one_record_of_the_joined_chunks(
    joining: Settings, start_worker: StartWorker
) -> None:
    texts = texts_of(80)
    texts[33] += " crash-encoder"
    with kept_alive(start_worker, 1, hardware="joining") as workers:
        job = submit(joining, texts)
        eventually(lambda: job.status().state.ended)
        assert deaths(workers)[0] == -signal.SIGSEGV
    status = job.status()
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 79, 1)
    assert [(error.position, error.code) for error in job.errors()] == [(33, "crashed_worker")]
    assert status.deaths > 1  # of every chunk that was in the batch
    good = [at for at in range(80) if at != 33]
    np.testing.assert_array_equal(job.vectors()[good], reference([texts[at] for at in good]))


@pytest.mark.slow
def test_a_record_that_fails_costs_one_record_of_the_joined_chunks(
    joining: Settings, start_worker: StartWorker
) -> None:
    worker = start_worker("joining")
    texts = texts_of(200)
    texts[71], texts[120] = "text fail-encoder", "text out-of-memory"
    job = submit(joining, texts)
    status = job.wait(timeout=60)
    assert (status.done, status.failed, status.deaths) == (198, 2, 0)
    assert [(error.position, error.code) for error in job.errors()] == [(71, "encode_error"), (120, "out_of_memory")]
    assert "trying each alone" in worker.log() or "batches are joined up to" in worker.log()


@pytest.mark.slow
def test_a_worker_that_is_told_to_stop_gives_back_what_waits(
    joining: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    worker = start_worker("joining")
    job = submit(joining, texts_of(600))
    eventually(lambda: len(owners(raw, job)) >= 3 and worker.row().progressed_ms > 0)
    assert worker.stop() == 0
    assert not owners(raw, job)
    assert job.status().done % 10 == 0
    start_worker("joining")
    status = job.wait(timeout=60)
    assert (status.done, status.deaths, status.lapsed) == (600, 0, 0)


def test_a_job_that_is_cancelled_leaves_the_chunks_joined_with_its_own(
    joining: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    start_worker("joining")
    unwanted, other = submit(joining, texts_of(2000)), submit(joining, texts_of(300))
    eventually(lambda: unwanted.status().done > 0)
    unwanted.cancel()
    assert other.wait(timeout=60).done == 300
    np.testing.assert_array_equal(other.vectors(), reference(texts_of(300)))
