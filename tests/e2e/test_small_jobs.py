"""A job that is one chunk by the settings alone, and several workers that could share it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embedctl import Job, JobUnfinished, enqueue_embeddings
from embedctl.retrying import TimeLimit
from embedctl.store import ServedModel
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

#: 32 batches of the class `slow`, of 0.1 s each. A worker that has not measured its rate gets at least 8 KiB.
TEXTS = [f"{number:02} " + f"{'x' * 25} " * 42 for number in range(32)]


def test_two_workers_share_a_small_file(
    start_worker: StartWorker, embedctl: RunEmbedctl, settings: Settings, short_folder: Path
) -> None:
    both = [start_worker("slow"), start_worker("slow")]
    (short_folder / "corpus.txt").write_text("\n".join(TEXTS) + "\n")
    estimated = embedctl("submit", "corpus.txt", "--class", "slow", "--dry-run")
    assert "chunks     4, of at most 512 records and" in estimated.stdout
    submitted = embedctl("submit", "corpus.txt", "--class", "slow", "--wait", "--resume", "k")
    job_id = submitted.stdout.split()[0]
    job = Job.get(job_id, settings)
    assert job.status().chunks == 4
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))
    assert all(job_id in worker.log() for worker in both)
    both[0].stop()
    again = embedctl("submit", "corpus.txt", "--class", "slow", "--resume", "k")
    assert (again.returncode, again.stdout.split()[0]) == (0, job_id)


def test_the_results_of_a_job_of_one_chunk_come_with_its_status(settings: Settings, start_worker: StartWorker) -> None:
    job = enqueue_embeddings(["one", "", "three"], settings=settings)
    start_worker()
    (chunk,) = job.results(timeout=60)
    np.testing.assert_array_equal(chunk.vectors[[0, 2]], reference(["one", "three"]))
    assert [(error.position, error.code) for error in chunk.errors] == [(1, "empty")]
    other = Job.get(job.id, settings)
    assert [each.positions.tolist() for each in other.results()] == [[0, 1, 2]]

    job.retry_failed()
    (again,) = job.results(timeout=60)
    np.testing.assert_array_equal(again.vectors[[0, 2]], chunk.vectors[[0, 2]])
    assert [error.code for error in again.errors] == ["empty"]


def test_vectors_of_a_job_that_another_process_retries_at_once_are_not_waited_for(
    settings: Settings, start_worker: StartWorker
) -> None:
    job = enqueue_embeddings(["one", ""], settings=settings)
    worker = start_worker()
    job.wait(timeout=60)
    worker.stop()
    ended = job._waiter.until_ended(TimeLimit.from_now(60), None)  # known for a second from now on
    assert ended.failed == 1
    assert Job.get(job.id, settings).retry_failed() == 1
    with pytest.raises(JobUnfinished):
        job.vectors()


def test_a_heartbeat_tells_what_a_worker_sustains_and_the_longest_text(
    start_worker: StartWorker, settings: Settings
) -> None:
    worker = start_worker()

    def served() -> ServedModel:
        return worker.row().models["dummy"]

    enqueue_embeddings(["a single text"], settings=settings).wait(60)
    eventually(lambda: served().tokens_per_s > 0)
    assert (served().sustained_tokens_per_s, served().max_tokens) == (0, 256)
    enqueue_embeddings(["word " * 60] * 5 + [f"{n} " * 60 for n in range(95)], settings=settings).wait(60)
    eventually(lambda: served().sustained_tokens_per_s > 0)
