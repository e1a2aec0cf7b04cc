"""Workers that lose the ability to encode after their start. They leave, and no record is blamed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from embedctl import JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.limits import limited, settings_of
from tests.support.processes import RunEmbedctl
from tests.support.sick_backends import register
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, WorkerProcess

TEXTS = [f"text {i} of many" for i in range(4000)]


@pytest.fixture
def start(environment: dict[str, str], short_folder: Path, start_worker: StartWorker) -> StartWorker:
    """Starts workers of one class, each with a backend and options of its own."""
    common = (short_folder / "embedctl.toml").read_text()
    shared = dict(environment)

    def configured(backend: str, options: str, *, wait: bool = True) -> WorkerProcess:
        own = short_folder / f"{backend}.toml"
        own.write_text(f'{common}\n[classes.mixed]\nbackend = "{backend}"\noptions = {{dim = 16{options}}}\n')
        environment["EMBEDCTL_CONFIG"] = str(own)
        try:
            return start_worker("mixed", wait=wait, prepare=register)
        finally:
            environment["EMBEDCTL_CONFIG"] = shared["EMBEDCTL_CONFIG"]

    (short_folder / "embedctl.toml").write_text(f'{common}\n[classes.mixed]\nbackend = "dummy"\n')
    return configured


@pytest.fixture
def mixed(start: StartWorker, environment: dict[str, str]) -> Settings:
    """The settings of a producer that knows the class."""
    return settings_of(environment)


def test_a_worker_that_falls_sick_leaves_and_the_others_encode_every_record(
    mixed: Settings, environment: dict[str, str], start: StartWorker
) -> None:
    environment["EMBEDCTL_LEASE_S"] = "10"  # no lease is to lapse, however busy the machine is
    sick, well = start("fading", ", batches = 8"), start("dummy", ", seconds_per_batch = 0.02")
    job = enqueue_embeddings(TEXTS, hardware="mixed", chunk_size=100, settings=mixed)
    status = job.wait(timeout=120)
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED, 4000, 0)
    assert sick.process.wait(60) == 71
    assert "Traceback" not in sick.log()
    assert sick.log().count("ending this process") == 1
    assert (status.deaths, status.lapsed) == (0, 0)
    trouble = job.status().trouble or ""
    assert "@" in trouble
    assert "can't encode a text of its own: the backend failed: MemoryError: the host has no memory left" in trouble
    assert well.process.poll() is None
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


@pytest.mark.slow
def test_a_worker_that_is_sick_from_its_start_takes_nothing(mixed: Settings, start: StartWorker) -> None:
    starved = start("dummy", ", memory_tokens = 1", wait=False)
    assert starved.process.wait(60) == 71
    assert "this worker can't encode a text of its own" in starved.log()
    start("dummy", "")
    job = enqueue_embeddings(TEXTS, hardware="mixed", chunk_size=100, settings=mixed)
    assert job.wait(timeout=60).done == 4000
    assert job.status().claims == 40


@pytest.mark.slow
def test_a_job_waits_with_its_records_when_every_worker_is_sick(
    mixed: Settings, start: StartWorker, embedctl: RunEmbedctl
) -> None:
    sick = [start("fading", ", batches = 4"), start("fading", ", batches = 4")]
    job = enqueue_embeddings(TEXTS, hardware="mixed", chunk_size=100, settings=mixed)
    assert [worker.process.wait(60) for worker in sick] == [71, 71]
    status = job.status()
    assert (status.failed, status.deaths, status.state) == (0, 0, JobState.RUNNING)
    assert status.done < 4000
    (line,) = [line for line in embedctl("status", job.id).stdout.splitlines() if line.startswith("trouble")]
    assert "worker mixed:" in line
    assert "the host has no memory left" in line
    start("dummy", "")
    eventually(lambda: job.status().state.ended)
    assert (job.status().done, job.status().failed) == (4000, 0)
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_one_worker_alone_ends_a_job_with_a_bad_record(settings: Settings, start_worker: StartWorker) -> None:
    worker = start_worker("poison")
    texts = [*TEXTS[:200], "it will fail-encoder"]
    job = enqueue_embeddings(texts, hardware="poison", chunk_size=100, settings=settings)
    status = job.wait(timeout=60)
    assert (status.state, status.done, status.claims) == (JobState.COMPLETED_WITH_ERRORS, 200, 3)
    assert [(error.position, error.code) for error in job.errors()] == [(200, "encode_error")]
    assert worker.process.poll() is None


@pytest.mark.slow
def test_a_worker_that_is_too_small_for_the_records_alone_fails_none_of_them(
    mixed: Settings, start: StartWorker
) -> None:
    """The worker can still encode its own test text, so it does not know that it is to blame."""
    small = start("dummy", ", memory_tokens = 40")
    large = start("fading", ", batches = 100000, seconds_per_batch = 0.05")
    texts = [f"text {i} " + "word " * 60 for i in range(400)]
    job = enqueue_embeddings(texts, hardware="mixed", chunk_size=10, settings=limited(mixed, window=50))
    status = job.wait(timeout=120)
    assert (status.done, status.failed, status.deaths) == (400, 0, 0)
    assert small.process.poll() is None
    assert small.logged("10 records failed here, twice: another worker is to try them before they count as failed")
    assert large.process.poll() is None
    np.testing.assert_array_equal(job.vectors(), reference(texts))


@pytest.mark.slow
def test_a_record_that_leaves_every_worker_of_no_use_fails_in_the_end(mixed: Settings, start: StartWorker) -> None:
    texts = [*TEXTS[:95], "a sticky one", *TEXTS[96:100]]
    job = enqueue_embeddings(texts, hardware="mixed", chunk_size=10, settings=mixed)

    def over(worker: WorkerProcess) -> bool:
        return worker.process.poll() is not None or job.status().state.ended

    for _ in range(12):  # a supervisor would restart a worker each time
        one = start("sticky", "", wait=False)
        eventually(partial(over, one))
        if job.status().state.ended:
            break
        assert one.process.poll() == 71
    status = job.status()
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 99, 1)
    assert [(error.position, error.code) for error in job.errors()] == [(95, "encode_error")]
    assert status.deaths == 0


@pytest.mark.parametrize("texts", [["a", "b fail-encoder", "c"], ["fail-encoder"], ["out-of-memory", "a"]])
def test_a_bad_record_does_not_wait_for_a_worker_that_is_busy(
    environment: dict[str, str], short_folder: Path, start_worker: StartWorker, texts: list[str]
) -> None:
    """With the default times of users: a ticket is sent again only later than the wait here."""
    config = short_folder / "embedctl.toml"
    config.write_text(config.read_text().replace("lease_s = 1.0\n", "hang_s = 1000\n"))
    del environment["LIMIT_REISSUE_S"]
    settings = settings_of(environment)
    assert settings.limits.reissue_s == 60
    busy = start_worker("poison")
    long = [  # with other options each: they share no batch, so each keeps a thread busy
        enqueue_embeddings([f"{at} hang-encoder"], normalize=bool(at), hardware="poison", settings=settings)
        for at in range(2)
    ]
    eventually(lambda: all(job.status().claims for job in long))
    start_worker("poison")
    job = enqueue_embeddings(texts, hardware="poison", settings=settings)
    status = job.wait(timeout=50)  # less than reissue_s
    assert (status.done, status.failed) == (len(texts) - 1, 1)
    busy.process.kill()
