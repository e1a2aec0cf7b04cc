"""Many callers with small jobs on one worker: what goes wrong in one job costs the others nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import redis as redis_py

from embedctl import Job, JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.jobs import owners, reference
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, kept_alive


def texts_of(number: int) -> list[str]:
    return [f"job {number} text {row}" for row in range(1 + number % 8)]


def submit(settings: Settings, count: int, poison: dict[int, str], hardware: str = "poison") -> list[Job]:
    """Small jobs; the first text of some of them holds a word that harms the worker."""
    return [
        enqueue_embeddings(
            [text + (f" {poison[number]}" if number in poison and not row else "") for row, text in enumerate(texts)],
            hardware=hardware,
            settings=settings,
        )
        for number, texts in ((number, texts_of(number)) for number in range(count))
    ]


def assert_only_the_poison_failed(jobs: list[Job], poison: dict[int, str], code: str) -> None:
    for number, job in enumerate(jobs):
        texts, status = texts_of(number), job.wait(timeout=60)
        failed = [0] if number in poison else []
        assert (status.done, status.failed) == (len(texts) - len(failed), len(failed))
        assert [(error.position, error.code) for error in job.errors()] == [(row, code) for row in failed]
        good = [row for row in range(len(texts)) if row not in failed]
        np.testing.assert_array_equal(job.vectors()[good], reference([texts[row] for row in good]))


def test_one_poison_text_among_a_hundred_jobs_costs_one_record(settings: Settings, start_worker: StartWorker) -> None:
    poison = {41: "fail-encoder"}
    jobs = submit(settings, 100, poison)
    start_worker("poison")
    assert_only_the_poison_failed(jobs, poison, "encode_error")
    assert all(job.status().claims == 1 for job in jobs)


@pytest.mark.slow
def test_a_text_that_kills_workers_costs_one_record_of_the_joined_jobs(
    settings: Settings, start_worker: StartWorker
) -> None:
    poison = {17: "crash-encoder"}
    jobs = submit(settings, 40, poison)
    with kept_alive(start_worker, 1):
        eventually(lambda: all(job.status().state.ended for job in jobs))
    assert_only_the_poison_failed(jobs, poison, "crashed_worker")
    assert sum(job.status().deaths > 0 for job in jobs) > 1  # of every chunk that was in the batch


def test_a_worker_that_is_killed_in_the_middle_leaves_each_joined_chunk_to_be_tried_alone(
    settings: Settings,
    raw: redis_py.Redis,
    environment: dict[str, str],
    short_folder: Path,
    start_worker: StartWorker,
) -> None:
    jobs = submit(settings, 12, {}, hardware="slow")
    usual = environment["EMBEDCTL_CONFIG"]
    slower = short_folder / "slower.toml"  # so that the worker is still there when the test has seen what it holds
    slower.write_text(Path(usual).read_text().replace("seconds_per_batch = 0.1}", "seconds_per_batch = 1.0}"))
    environment["EMBEDCTL_CONFIG"] = str(slower)
    worker = start_worker("slow")
    environment["EMBEDCTL_CONFIG"] = usual
    eventually(lambda: sum(len(owners(raw, job)) for job in jobs) > 3)
    worker.kill()
    held = [job for job in jobs if owners(raw, job)]
    second = start_worker("slow")
    for number, job in enumerate(jobs):
        assert job.wait(timeout=60).state is JobState.COMPLETED
        np.testing.assert_array_equal(job.vectors(), reference(texts_of(number)))
    assert all(job.status().deaths == 1 for job in held)
    assert len([line for line in second.log().splitlines() if "encoding it alone" in line]) == len(held)
