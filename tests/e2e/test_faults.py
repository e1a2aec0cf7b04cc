"""Workers that die, hang or are stopped in the middle of a chunk, and a Redis that goes away."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
import redis as redis_py

from embedctl import JobState, enqueue_embeddings
from embedctl.broker import Broker
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.limits import limited
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

TEXTS = [f"text {i} " + "word " * 60 for i in range(60)]
#: Six chunks of five: half a second of the class `slow` each.
SLOW = TEXTS[:30]


def test_kill_9_in_the_middle_of_a_chunk_loses_and_doubles_nothing(
    settings: Settings, start_worker: StartWorker
) -> None:
    doomed = start_worker("slow")
    job = enqueue_embeddings(SLOW, hardware="slow", chunk_size=5, settings=settings)
    eventually(lambda: doomed.row().progressed_ms > 0 and doomed.row().holding)
    doomed.kill()
    start_worker("slow")
    status = job.wait(timeout=60)
    assert status.state is JobState.COMPLETED
    assert (status.records, status.done, status.failed) == (30, 30, 0)
    assert status.chunks_done == 6
    assert status.claims > 6
    assert status.lapsed >= 1
    np.testing.assert_array_equal(job.vectors(), reference(SLOW))


def test_sigterm_finishes_the_chunk_it_encodes_and_hands_back_the_next(
    settings: Settings, environment: dict[str, str], start_worker: StartWorker
) -> None:
    environment["EMBEDCTL_LEASE_S"] = "10"  # none lapses on a busy machine
    patient = limited(settings.replace(lease_s=60), reissue_s=60)
    leaving = start_worker("slow")
    job = enqueue_embeddings(SLOW, hardware="slow", chunk_size=5, settings=patient)
    eventually(lambda: job.status().claims >= 2 and leaving.row().progressed_ms)
    assert leaving.stop() == 0
    left = job.status()
    assert left.chunks_done >= 1
    start_worker("slow")
    status = job.wait(timeout=60)
    assert status.lapsed == 0
    assert (status.done, status.refused) == (30, 0)
    np.testing.assert_array_equal(job.vectors(), reference(SLOW))


def test_a_stopped_worker_whose_lease_lapsed_does_no_harm_when_it_goes_on(
    settings: Settings, start_worker: StartWorker
) -> None:
    frozen = start_worker("slow")
    job = enqueue_embeddings(SLOW, hardware="slow", chunk_size=5, settings=settings)
    eventually(lambda: frozen.row().holding)
    frozen.process.send_signal(signal.SIGSTOP)
    start_worker("slow")
    eventually(lambda: job.status().lapsed > 0)
    frozen.process.send_signal(signal.SIGCONT)
    status = job.wait(timeout=60)
    assert (status.done, status.failed) == (30, 0)
    np.testing.assert_array_equal(job.vectors(), reference(SLOW))


def test_a_hung_encode_ends_the_process(
    settings: Settings, environment: dict[str, str], start_worker: StartWorker
) -> None:
    environment["EMBEDCTL_HANG_S"] = "2"
    hung = start_worker("hung")
    job = enqueue_embeddings(["hang-encoder"], hardware="hung", settings=settings)
    eventually(lambda: hung.process.poll() is not None)
    assert hung.process.returncode == 70
    assert hung.logged("no progress for 2 s", job=job.id, chunk=0, attempt=1)
    assert job.status().state is JobState.RUNNING


def test_deleted_and_doubled_tickets(
    settings: Settings, broker: Broker, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    job = enqueue_embeddings(TEXTS, chunk_size=5, settings=settings)
    queue = job.status().queue
    assert raw.llen(queue) == 8  # the window
    raw.rpop(queue)
    raw.rpop(queue)
    broker.tickets.send(queue, job.id, [3, 3, 4])
    broker.tickets.send(queue, "20200101-000000-0000000000", [0])
    start_worker()
    status = job.wait(timeout=60)
    assert (status.done, status.claims, status.refused) == (60, 12, 0)
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


@pytest.mark.slow
def test_redis_goes_away_and_comes_back(
    settings: Settings, redis_server: RedisServer, start_worker: StartWorker
) -> None:
    worker = start_worker("slow")
    job = enqueue_embeddings(SLOW, hardware="slow", chunk_size=5, settings=settings)
    eventually(lambda: job.status().claims > 0)
    redis_server.stop()
    eventually(lambda: "held back" in worker.log(), show=worker.log)
    redis_server.start()
    status = job.wait(timeout=90)
    assert (status.done, status.failed) == (30, 0)
    np.testing.assert_array_equal(job.vectors(), reference(SLOW))


@pytest.mark.slow
def test_every_worker_holds_two_tickets_at_most(
    settings: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    wide = limited(settings, window=50)
    job = enqueue_embeddings(TEXTS, hardware="slow", chunk_size=1, settings=wide)
    assert raw.llen(job.status().queue) == 50
    workers = [start_worker("slow"), start_worker("slow")]
    samples = []
    while not job.status().state.ended:
        samples.append(raw.hlen("unacked"))
        time.sleep(0.01)  # the workers need the CPU too
    assert max(samples) <= 2 * len(workers)
    assert max(samples) >= 2


@pytest.mark.slow
def test_workers_with_other_weights_never_mix_their_vectors(
    settings: Settings, environment: dict[str, str], short_folder: Path, start_worker: StartWorker
) -> None:
    first = start_worker()
    other = short_folder / "other.toml"
    other.write_text((short_folder / "embedctl.toml").read_text().replace("{dim = 16}", "{dim = 16, seed = 1}"))
    environment["EMBEDCTL_CONFIG"] = str(other)
    second = start_worker()
    jobs = [enqueue_embeddings(TEXTS, chunk_size=2, settings=settings) for _ in range(3)]
    for job in jobs:
        status = job.wait(timeout=60)
        assert status.done == 60
        seeds = {first.row().instance: 0, second.row().instance: 1}
        np.testing.assert_array_equal(job.vectors(), reference(TEXTS, seed=seeds[status.pinned_by or ""]))
    assert any(job.status().mismatch for job in jobs)


def test_a_worker_of_another_precision_leaves_the_job_alone(
    settings: Settings, short_folder: Path, start_worker: StartWorker
) -> None:
    config = short_folder / "embedctl.toml"
    good = config.read_text()
    config.write_text(
        good.replace('[classes.dummy]\nbackend = "dummy"', '[classes.dummy]\nbackend = "dummy"\nprecision = "int8"')
    )
    other = start_worker()
    job = enqueue_embeddings(TEXTS, chunk_size=20, settings=settings)
    eventually(lambda: "offers int8" in other.log())
    assert job.status().chunks_done == 0
    config.write_text(good)
    start_worker()
    assert job.wait(timeout=60).done == 60
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))
