"""Workers that fall sick or join the batches of several chunks: what goes wrong blames no other record."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from embedctl import Job, JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.here import Here
from tests.support.jobs import assert_encoded, reference
from tests.support.limits import settings_of
from tests.support.sick_backends import register
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, WorkerProcess, deaths, kept_alive

TEXTS = [f"text {i} of many" for i in range(4000)]


def test_a_worker_that_falls_sick_leaves_and_the_others_encode_every_record(here: Here) -> None:
    config = here.folder / "embedctl.toml"
    common = config.read_text()

    def start(backend: str, option: str) -> WorkerProcess:
        config.write_text(f'{common}\n[classes.mixed]\nbackend = "{backend}"\noptions = {{dim = 16, {option}}}\n')
        return here.start_worker("mixed", prepare=register)

    here.environment["EMBEDCTL_LEASE_S"] = "10"  # no lease is to lapse, however busy the machine is
    sick, well = start("fading", "batches = 8"), start("dummy", "seconds_per_batch = 0.02")
    job = enqueue_embeddings(TEXTS, hardware="mixed", chunk_size=100, settings=settings_of(here.environment))
    assert_encoded(job, TEXTS)
    assert sick.process.wait(60) == 71
    assert "Traceback" not in sick.log()
    assert sick.log().count("ending this process") == 1
    assert (job.status().deaths, job.status().lapsed) == (0, 0)
    trouble = job.status().trouble or ""
    assert "@" in trouble
    assert "can't encode a text of its own: the backend failed: MemoryError: the host has no memory left" in trouble
    assert well.process.poll() is None


def test_a_bad_record_does_not_wait_for_a_worker_that_is_busy(here: Here) -> None:
    """With the default times of users."""
    config = here.folder / "embedctl.toml"
    config.write_text(config.read_text().replace("lease_s = 1.0\n", "hang_s = 1000\n"))
    settings = settings_of(here.environment)
    busy = here.start_worker("poison")
    long = [  # with other options each: they share no batch, so each keeps a thread busy
        enqueue_embeddings([f"{at} hang-encoder"], normalize=bool(at), hardware="poison", settings=settings)
        for at in range(2)
    ]
    eventually(lambda: all(job.status().claims for job in long))
    here.start_worker("poison")
    job = enqueue_embeddings(["a", "b fail-encoder", "c"], hardware="poison", settings=settings)
    status = job.wait(timeout=50)  # less than a lease
    assert (status.done, status.failed) == (2, 1)
    busy.process.kill()


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
    return settings_of(environment)


def submit(settings: Settings, texts: list[str]) -> Job:
    return enqueue_embeddings(texts, hardware="joining", chunk_size=10, settings=settings)


def texts_of(count: int) -> list[str]:
    return [f"text {i}" for i in range(count)]


def test_chunks_are_joined_and_every_record_has_its_vector(joining: Settings, start_worker: StartWorker) -> None:
    worker = start_worker("joining", prepare=register)
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
def test_a_record_that_kills_a_worker_costs_the_joined_chunks_one(joining: Settings, start_worker: StartWorker) -> None:
    texts = texts_of(80)
    texts[33] += " crash-encoder"
    with kept_alive(partial(start_worker, prepare=register), 1, hardware="joining") as workers:
        job = submit(joining, texts)
        eventually(lambda: job.status().state.ended)
        assert deaths(workers)[0] == -signal.SIGSEGV
    status = job.status()
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 79, 1)
    assert [(error.position, error.code) for error in job.errors()] == [(33, "crashed_worker")]
    assert status.deaths > 1  # of every chunk that was in the batch
    good = [at for at in range(80) if at != 33]
    np.testing.assert_array_equal(job.vectors()[good], reference([texts[at] for at in good]))
