"""Nobody waits for what can't come any more, nor longer than told to, and nobody waits in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis

from embedctl import (
    Job,
    JobCancelled,
    JobError,
    JobFailed,
    JobLost,
    JobStalled,
    JobState,
    JobStatus,
    WaitTimeout,
    aenqueue_embeddings,
    enqueue_embeddings,
)
from embedctl.common import notices
from embedctl.queueing.broker import Broker
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.clocks import MovedClock
from tests.support.limits import limited
from tests.support.store import members, new_job, work
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.waits import WAITS

#: Those of the chunks that `work` completes.
TEXTS = [f"text {chunk} {row}" for chunk in range(4) for row in range(2)]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Each chunk alone is more text than may wait."""
    return limited(settings.replace(chunk_size=2), high_water_bytes=1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that was silent for a moment has died."""
    monkeypatch.setattr(keys, "PRODUCER_LEASE_S", 1)


def submit_in(pool: ThreadPoolExecutor, settings: Settings, waits: list[str], **options: Any) -> Future[Job]:
    return pool.submit(
        enqueue_embeddings, TEXTS, progress=lambda _, what: waits.append(what), settings=settings, **options
    )


def only_job(raw: Redis) -> str:
    (job_id,) = members(raw, keys.JOBS)
    return job_id


def lose_the_seal(raw: Redis, job_id: str) -> None:
    """Redis comes back without its last write, and the producer's lease is over."""
    raw.hdel(keys.job(job_id), "original_chunks", "sealed", "ended_ms")
    raw.hset(keys.job(job_id), "state", "submitting")
    raw.delete(keys.producer(job_id))


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("cancel", JobCancelled),
        ("discard", JobError),  # it is cancelled first, and then gone
        ("max_errors", JobFailed),
        ("lost", JobLost),
    ],
)
def test_no_room_will_come(settings: Settings, broker: Broker, raw: Redis, end: str, error: type[JobError]) -> None:
    waits: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        submitted = submit_in(pool, settings, waits, max_errors=0)
        eventually(lambda: any(waits))
        job_id = only_job(raw)
        if end == "cancel":
            broker.jobs.cancel(job_id)
        elif end == "discard":
            Job(job_id, broker).discard()
        elif end == "max_errors":
            # Something else waits besides, as where chunks are small and large.
            raw.hincrby(keys.job(job_id), "waiting_bytes", 10_000)
            work(broker, job_id, 0, failed=1)
        else:
            raw.hset(keys.job(job_id), mapping={"lost_first": 0, "lost_last": 0})
        with pytest.raises(error, match=job_id):
            submitted.result(PATIENCE_S)


def test_a_producer_that_waits_says_that_no_worker_lives(
    settings: Settings, broker: Broker, raw: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        submitted = submit_in(pool, settings, waits)
        eventually(lambda: any("embedctl worker --class dummy --model dummy" in each for each in waits))
        eventually(lambda: "No live worker serves dummy on dummy" in caplog.text)
        broker.jobs.cancel(only_job(raw))
        with pytest.raises(JobCancelled):
            submitted.result(PATIENCE_S)


def time_passes(clock: MovedClock) -> Callable[[int, str], None]:
    """Takes the place of `progress`: as soon as the submission waits, its time is over."""
    return lambda _, waiting_for: clock.move(1000 * bool(waiting_for))


@pytest.mark.parametrize("key", [None, "k"])
def test_time_ends_a_wait(settings: Settings, broker: Broker, raw: Redis, clock: MovedClock, key: str | None) -> None:
    with pytest.raises(WaitTimeout, match=r"the first 2 of its records after 999 s: its submission waits for workers"):
        enqueue_embeddings(TEXTS, timeout=999, progress=time_passes(clock), idempotency_key=key, settings=settings)
    if key is None:
        assert broker.jobs.status(only_job(raw)).state is JobState.CANCELLED
    else:
        job = enqueue_embeddings(TEXTS, idempotency_key=key, settings=limited(settings, high_water_bytes=10**6))
        assert (job.id, job.status().sealed) == (only_job(raw), True)


def test_the_time_counts_between_chunks(settings: Settings, broker: Broker, raw: Redis, clock: MovedClock) -> None:
    def slow() -> Iterator[str]:
        yield from TEXTS[:4]
        clock.move(1000)
        yield from TEXTS[4:]

    with pytest.raises(WaitTimeout, match=r"the first 2 of its records after 999 s$"):
        enqueue_embeddings(slow(), timeout=999, settings=limited(settings, high_water_bytes=10**6))


def test_another_producer_is_awaited_in_time(settings: Settings, broker: Broker, raw: Redis, clock: MovedClock) -> None:
    roomy = limited(settings, high_water_bytes=10**6)
    job = enqueue_embeddings(TEXTS, idempotency_key="k", settings=roomy)
    lose_the_seal(raw, job.id)
    assert broker.jobs.hold(job.id, "another")
    with pytest.raises(WaitTimeout, match="waits for another producer"):
        enqueue_embeddings(TEXTS, idempotency_key="k", timeout=999, progress=time_passes(clock), settings=roomy)


async def submitted_in_a_loop(settings: Settings) -> Job:
    return (await aenqueue_embeddings(TEXTS, settings=settings))._job


@pytest.mark.parametrize("awaited", [False, True])
def test_a_producer_seals_again_where_redis_lost_that(
    settings: Settings, broker: Broker, raw: Redis, caplog: pytest.LogCaptureFixture, awaited: bool
) -> None:
    roomy = limited(settings, high_water_bytes=10**6)
    job = asyncio.run(submitted_in_a_loop(roomy)) if awaited else enqueue_embeddings(TEXTS, settings=roomy)
    work(broker, job.id, 0, 1, 2, 3)
    lose_the_seal(raw, job.id)
    assert WAITS["await wait" if awaited else "wait"](job, PATIENCE_S).state is JobState.COMPLETED
    assert "is sealed again" in caplog.text


@pytest.mark.parametrize("call", WAITS)
def test_waiting_for_a_dead_producer_ends(broker: Broker, raw: Redis, impatient: None, call: str) -> None:
    job_id = new_job(broker, 2, seal=False)
    work(broker, job_id, 0, 1)
    raw.delete(keys.producer(job_id))
    with pytest.raises(JobStalled, match=f"--resume {job_id}"):
        WAITS[call](Job(job_id, broker), PATIENCE_S)


def test_a_producer_that_comes_back_in_time_is_waited_for(broker: Broker, raw: Redis, impatient: None) -> None:
    job_id = new_job(broker, 1, seal=False)
    work(broker, job_id, 0)
    raw.delete(keys.producer(job_id))
    looks = 0

    def resume(status: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            assert broker.jobs.hold(job_id, "next", lease_s=60)
        if looks == 3:
            broker.jobs.seal(job_id, 1)

    assert Job(job_id, broker).wait(PATIENCE_S, resume).state is JobState.COMPLETED


@pytest.mark.parametrize("call", WAITS)
def test_nothing_is_waited_for_any_longer_than_told(broker: Broker, call: str) -> None:
    job_id = new_job(broker, 2, seal=False)
    work(broker, job_id, 0)
    with pytest.raises(WaitTimeout, match=r"after 0\.2 s"):
        WAITS[call](Job(job_id, broker), 0.2)


def test_that_no_worker_lives_is_logged_once_and_then_every_minute(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, clock: MovedClock
) -> None:
    monkeypatch.setattr("embedctl.waiting.waiter.LOOK_EVERY_S", 0.05)
    job, looks = Job(new_job(broker, 2), broker), []
    warn, warned_after = job._waiter.warn_of_missing_worker, []

    def look(status: JobStatus) -> None:
        before = len(caplog.records)
        warn(status)
        looks.append(status)
        if len(caplog.records) > before:
            warned_after.append(len(looks))
        if len(looks) in (5, 8):
            clock.move(notices.AGAIN_AFTER_S)
        if len(looks) == 10:
            broker.jobs.cancel(status.id)

    monkeypatch.setattr(job._waiter, "warn_of_missing_worker", look)
    job.wait()
    assert warned_after == [1, 6, 9]
    assert {each.levelno for each in caplog.records if "No live worker" in each.message} == {logging.WARNING}
