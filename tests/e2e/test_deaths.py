"""Workers that are killed or stopped at the worst of times: every record ends once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import redis as redis_py

from embedctl import Job, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.here import Here
from tests.support.jobs import assert_encoded, owners
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess

TEXTS = [f"text {i} " + "word " * 60 for i in range(60)]
#: Six chunks of five: half a second of the class `slow` each.
SLOW = TEXTS[:30]


def submit(settings: Settings, *, records: int = 40, chunk_size: int = 10) -> Job:
    """A job of the class that takes a tenth of a second for each record."""
    return enqueue_embeddings(TEXTS[:records], hardware="slow", chunk_size=chunk_size, settings=settings)


def row_in_hand(raw: redis_py.Redis, job: Job) -> int:
    """The current row of a worker in careful mode; -1 if there is none."""
    rows = [int(owner[5]) for owner in owners(raw, job).values() if owner[5:] and owner[5]]
    return max(rows, default=-1)


def in_the_middle(raw: redis_py.Redis, job: Job, worker: WorkerProcess, chunks: int = 1) -> bool:
    """Whether a worker holds leases of this many chunks and has finished a batch since it began."""
    return len(owners(raw, job)) >= chunks and worker.row().progressed_ms > 0


def test_kill_9_in_the_middle_of_a_chunk_loses_and_doubles_nothing(here: Here) -> None:
    doomed = here.start_worker("slow")
    job = enqueue_embeddings(SLOW, hardware="slow", chunk_size=5, settings=here.settings)
    eventually(lambda: doomed.row().progressed_ms > 0 and doomed.row().holding)
    doomed.kill()
    here.start_worker("slow")
    assert_encoded(job, SLOW)
    assert job.status().claims > 6
    assert job.status().lapsed >= 1


def test_sigterm_finishes_the_chunk_it_encodes_and_hands_back_the_next(here: Here) -> None:
    here.environment["EMBEDCTL_LEASE_S"] = "10"  # none lapses on a busy machine
    leaving = here.start_worker("slow")
    job = enqueue_embeddings(SLOW, hardware="slow", chunk_size=5, settings=here.settings)
    eventually(lambda: job.status().claims >= 2 and leaving.row().progressed_ms)
    assert leaving.stop() == 0
    left = job.status()
    assert left.chunks_done >= 1
    here.start_worker("slow")
    assert_encoded(job, SLOW)
    assert (job.status().lapsed, job.status().refused) == (0, 0)


@pytest.mark.slow
def test_sigterm_in_the_middle_of_a_suspect_chunk_hands_it_back_and_blames_nobody(here: Here) -> None:
    doomed = here.start_worker("slow")
    job = submit(here.settings, records=60, chunk_size=60)
    eventually(lambda: in_the_middle(here.raw, job, doomed))
    doomed.kill()
    leaving = here.start_worker("slow")
    eventually(lambda: row_in_hand(here.raw, job) >= 2)
    leaving.process.terminate()
    assert leaving.process.wait(120) == 0
    assert owners(here.raw, job) == {}
    assert job.status().chunks_done == 0
    (suspect,) = job.suspects()
    assert (suspect.given_up, len(suspect.deaths)) == ((), 1)
    here.start_worker("slow")
    assert_encoded(job, TEXTS)
    assert job.status().deaths == 1


def test_ctrl_c_twice_in_the_middle_of_a_chunk_loses_nothing(here: Here) -> None:
    leaving = here.start_worker("slow")
    job = submit(here.settings)
    eventually(lambda: in_the_middle(here.raw, job, leaving, chunks=2))
    leaving.process.send_signal(signal.SIGINT)
    eventually(lambda: "a second Ctrl-C" in leaving.log())
    leaving.process.send_signal(signal.SIGINT)
    assert leaving.process.wait(60) == 0
    assert "gives back" in leaving.log()
    assert "Traceback" not in leaving.log()
    assert owners(here.raw, job) == {}
    here.start_worker("slow")
    assert_encoded(job, TEXTS[:40])
    assert job.status().deaths == 0


@pytest.mark.in_redis  # others are not joined
def test_a_worker_that_is_killed_in_the_middle_leaves_each_joined_chunk_to_be_tried_alone(here: Here) -> None:
    corpora = [[f"job {number} text {row}" for row in range(1 + number % 8)] for number in range(12)]
    jobs = [enqueue_embeddings(texts, hardware="slow", settings=here.settings) for texts in corpora]
    usual = here.environment["EMBEDCTL_CONFIG"]
    slower = here.folder / "slower.toml"  # so that the worker is still there when the test has seen what it holds
    slower.write_text(Path(usual).read_text().replace("seconds_per_batch = 0.1}", "seconds_per_batch = 5.0}"))
    here.environment["EMBEDCTL_CONFIG"] = str(slower)
    worker = here.start_worker("slow")
    here.environment["EMBEDCTL_CONFIG"] = usual
    eventually(lambda: sum(len(owners(here.raw, job)) for job in jobs) > 3)
    worker.kill()
    held = [job for job in jobs if owners(here.raw, job)]
    second = here.start_worker("slow")
    for texts, job in zip(corpora, jobs, strict=True):
        assert_encoded(job, texts)
    assert all(job.status().deaths == 1 for job in held)
    assert len([line for line in second.log().splitlines() if "encoding it alone" in line]) == len(held)
