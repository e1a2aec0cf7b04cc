"""Submitting and waiting without blocking an event loop, with a real Redis and real workers."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import redis as redis_py

from embedctl import (
    AsyncJob,
    ChunkVectors,
    InputError,
    JobCancelled,
    JobNotFound,
    JobState,
    JobStatus,
    JobUnfinished,
    WaitTimeout,
    aenqueue_embeddings,
    enqueue_embeddings,
    listening,
)
from embedctl.broker import Broker
from embedctl_config.settings import Settings
from embedctl_workers.arrays.tokens import Vectors
from tests.support.jobs import active_job_id, job_reads, nobody_reads_jobs, reference
from tests.support.limits import limited
from tests.support.redis_server import RedisServer
from tests.support.store import active_jobs
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.workers import StartWorker

#: What waits: for Redis, for another thread, and for its time.
WAITS = (
    (redis_py.connection.AbstractConnection, "connect"),
    (redis_py.connection.AbstractConnection, "send_packed_command"),
    (redis_py.connection.AbstractConnection, "read_response"),
    (threading.Event, "wait"),
    (threading.Thread, "join"),
    (time, "sleep"),
)


@asynccontextmanager
async def ticking() -> AsyncIterator[None]:
    """Fails if the event loop's thread waits for anything while the block runs, except for a thread that it starts."""
    loop, waited = threading.get_ident(), []

    def noted(name: str, wait: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if threading.get_ident() == loop and sys._getframe(1).f_code is not threading.Thread.start.__code__:
                waited.append(f"{name}:\n{''.join(traceback.format_stack(limit=8))}")
            return wait(*given, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in WAITS:
            patch.setattr(owner, name, noted(name, getattr(owner, name)))
        yield
    assert not waited, waited[0]


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, condition)


def submitting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "embedctl-submit"]


def test_the_whole_way_awaited(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()
    texts = [f"text {at} {'word ' * (at % 50)}" for at in range(2000)]
    texts[7] = ""

    async def rows() -> AsyncIterator[dict[str, object]]:
        for at, text in enumerate(texts):
            if at % 100 == 0:
                await asyncio.sleep(0.001)  # others run meanwhile
            yield {"text": text, "id": at}

    async def main() -> None:
        told: list[JobStatus] = []
        threads: set[int] = set()

        def progress(status: JobStatus) -> None:
            told.append(status)
            threads.add(threading.get_ident())

        job = await aenqueue_embeddings(rows(), chunk_size=100, settings=settings)
        status = await job.wait(timeout=60, progress=progress)
        assert (status.state, status.records, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 2000, 1)
        assert told[-1] == status
        assert threads == {threading.get_ident()}

        vectors = await job.vectors()
        good = [at for at in range(2000) if at != 7]
        np.testing.assert_array_equal(vectors[good], reference([texts[at] for at in good]))
        assert np.isnan(vectors[7]).all()
        same = await AsyncJob.get(job.id, settings)
        assert [label async for chunk in same.iter_results(start=19) for label in chunk.ids] == [
            str(at) for at in range(1900, 2000)
        ]
        assert [(error.id, error.code) async for error in same.iter_errors()] == [("7", "empty")]
        assert len(await same.workers()) == 1
        assert (await same.gone_workers(), await same.suspects()) == ([], [])

        assert await job.retry_failed() == 1
        assert (await job.wait(timeout=60)).chunks == 21
        assert [error.code for error in await job.errors()] == ["empty"]
        assert (await job.cancel()).state is JobState.COMPLETED_WITH_ERRORS
        await job.discard()
        with pytest.raises(JobNotFound):
            await AsyncJob.get(job.id, settings)

    asyncio.run(main())


def test_the_loop_goes_on_whatever_is_waited_for(settings: Settings, start_worker: StartWorker) -> None:
    start_worker("slow")

    def slowly() -> Iterator[str]:
        for at in range(20):
            time.sleep(0.08)  # a corpus that is still being read when its first chunks are done
            yield f"text {at} " + "word " * 60

    async def main() -> None:
        async with ticking():
            job = await aenqueue_embeddings(slowly(), hardware="slow", chunk_size=5, settings=settings)
            first = await anext(job.iter_results())
            assert first.positions.tolist() == [0, 1, 2, 3, 4]
            with pytest.raises(JobUnfinished):
                await job.vectors()
            sealed = await job.wait_until_sealed()
            assert sealed.records == 20
            assert (await job.wait(timeout=60)).state is JobState.COMPLETED
            assert (await job.vectors()).shape == (20, 16)

    asyncio.run(main())


def test_results_come_while_the_job_runs(settings: Settings, start_worker: StartWorker) -> None:
    start_worker("slow")
    texts = [f"text {at} " + "word " * 60 for at in range(12)]

    async def main() -> None:
        job = await aenqueue_embeddings(texts, hardware="slow", chunk_size=3, settings=settings)
        told: list[JobStatus] = []
        vectors, unfinished = [], 0
        async with asyncio.timeout(PATIENCE_S):
            async for chunk in job.iter_results(progress=told.append):
                vectors.append(chunk.vectors)
                unfinished += not (await job.status()).state.ended
        assert unfinished
        assert told
        np.testing.assert_array_equal(np.concatenate(vectors), reference(texts))

    asyncio.run(main())


def test_the_results_of_a_small_job_come_at_its_end(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()

    async def main() -> None:
        job = await aenqueue_embeddings(["one", "", "three"], chunk_size=2, settings=settings)
        first, second = await job.results(timeout=60)
        assert (first.positions.tolist(), second.positions.tolist()) == ([0, 1], [2])
        assert [(error.position, error.code) for error in first.errors] == [(1, "empty")]
        np.testing.assert_array_equal(second.vectors, reference(["three"]))
        await job.cancel()
        await job.discard()

        never = await aenqueue_embeddings(["text"], hardware="slow", settings=settings)
        with pytest.raises(WaitTimeout):
            await never.results(timeout=0.2)
        await never.cancel()
        with pytest.raises(JobCancelled):
            await never.results(timeout=60)

    asyncio.run(main())


def test_hundreds_of_waits_leave_room_for_others_and_end_when_cancelled(
    settings: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    worker = start_worker()

    async def main() -> None:
        never = await aenqueue_embeddings(["text"], hardware="slow", settings=settings)
        jobs = [await AsyncJob.get(never.id, settings) for _ in range(200)]
        before = job_reads(raw)
        waits = [asyncio.create_task(job.wait()) for job in jobs]
        await until(lambda: job_reads(raw) >= before + len(jobs))
        async with ticking(), asyncio.timeout(PATIENCE_S):
            job = await aenqueue_embeddings(["text"], settings=settings)
            assert (await job.wait()).state is JobState.COMPLETED
            assert await asyncio.to_thread(lambda: "the loop's own threads are free") is not None
        assert not any(wait.done() for wait in waits)
        assert sum(thread.name.startswith("embedctl_") for thread in threading.enumerate()) <= listening.THREADS

        await asyncio.to_thread(worker.stop)  # its reaper looks at jobs too
        for wait in waits[:-10]:
            wait.cancel()
        await asyncio.wait(waits[:-10], timeout=120)
        assert all(wait.cancelled() for wait in waits[:-10])
        await never.cancel()
        assert [(await wait).state for wait in waits[-10:]] == [JobState.CANCELLED] * 10

    asyncio.run(main())


async def first_result(job: AsyncJob) -> ChunkVectors:
    return await anext(job.iter_results())


def test_a_cancelled_wait_looks_no_more(settings: Settings, raw: redis_py.Redis) -> None:
    async def main() -> None:
        job = await aenqueue_embeddings(["text"], settings=settings)
        before = job_reads(raw)
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(job.wait()),
            asyncio.create_task(job.wait(timeout=3600)),
            asyncio.create_task(first_result(job)),
        ]
        await until(lambda: job_reads(raw) >= before + len(waits))
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits, timeout=120)
        assert all(wait.cancelled() for wait in waits)
        await until(lambda: nobody_reads_jobs(raw))

    asyncio.run(main())


def test_waiting_ends_with_its_time_or_with_what_progress_raises(settings: Settings) -> None:
    async def main() -> None:
        job = await aenqueue_embeddings(["text"], settings=settings)
        began = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"after 0\.7 s: 0 of 1 records"):
            await job.wait(timeout=0.7)
        assert time.monotonic() - began >= 0.7

        def progress(status: JobStatus) -> None:
            raise InputError("enough")

        with pytest.raises(InputError, match="enough"):
            await job.wait(progress=progress)

    asyncio.run(main())


async def async_texts() -> AsyncIterator[str]:
    for at in itertools.count():
        await asyncio.sleep(0.005)  # it has no end: without a pause, it would fill Redis
        yield f"text {at}"


def texts() -> Iterator[str]:
    for at in itertools.count():
        time.sleep(0.005)  # as above
        yield f"text {at}"


@pytest.mark.parametrize("source", [texts, async_texts])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_cancelled_submission_is_freed_or_can_be_resumed(
    source: Callable[[], Any], key: str | None, settings: Settings, broker: Broker
) -> None:
    async def main() -> None:
        endless = aenqueue_embeddings(source(), chunk_size=10, idempotency_key=key, settings=settings)
        submitting = asyncio.create_task(endless)
        await until(lambda: list(active_jobs(broker)))
        job_id = active_job_id(broker)
        await until(lambda: broker.jobs.status(job_id).records >= 20)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await until(lambda: not submitting_threads())
        state = broker.jobs.status(job_id).state
        if key is None:
            assert state is JobState.CANCELLED
            return
        assert state is JobState.SUBMITTING
        job = await aenqueue_embeddings(
            (f"text {at}" for at in range(300)), chunk_size=10, idempotency_key=key, settings=settings
        )
        assert job.id == job_id
        assert (await job.status()).records == 300

    asyncio.run(main())


def test_a_submission_that_waits_for_workers_can_be_cancelled(settings: Settings, broker: Broker) -> None:
    narrow = limited(settings, high_water_bytes=1024)

    async def main() -> None:
        async with ticking():
            many = ["word " * 100] * 100
            submitting = asyncio.create_task(aenqueue_embeddings(many, chunk_size=2, settings=narrow))
            await until(lambda: list(active_jobs(broker)))
            await until(lambda: broker.jobs.status(active_job_id(broker)).waiting_bytes > 1024)
            submitting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await submitting
        await until(lambda: not submitting_threads())

    asyncio.run(main())


@pytest.mark.parametrize("wrong", ["one string", [{"body": "no text"}]])
def test_wrong_texts_are_refused_as_they_are_by_the_library(wrong: Any, settings: Settings) -> None:
    with pytest.raises(InputError) as plain:
        enqueue_embeddings(wrong, settings=settings)
    with pytest.raises(InputError) as awaited:
        asyncio.run(aenqueue_embeddings(wrong, settings=settings))
    assert str(awaited.value) == str(plain.value)


def test_texts_that_fail_while_they_are_read_cancel_their_job(settings: Settings, broker: Broker) -> None:
    async def failing() -> AsyncIterator[str]:
        for at in range(30):
            yield f"text {at}"
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        asyncio.run(aenqueue_embeddings(failing(), chunk_size=10, settings=settings))
    assert broker.jobs.status(active_job_id(broker)).state is JobState.CANCELLED


def test_more_failures_than_allowed_end_a_job(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()
    mixed = ["text", ""] * 50
    plain = enqueue_embeddings(mixed, max_errors=10, settings=settings)
    awaited = asyncio.run(aenqueue_embeddings(mixed, max_errors="10%", settings=settings))
    enough = enqueue_embeddings(mixed, max_errors="50%", settings=settings)
    states = [job.wait(timeout=60).state for job in (plain, enough)]
    assert states == [JobState.FAILED, JobState.COMPLETED_WITH_ERRORS]
    status = asyncio.run(awaited.wait(timeout=60))
    assert (status.state, status.stopped_by) == (JobState.FAILED, "max_errors")


class TestARedisThatGoesAway:
    @pytest.fixture
    def redis_server(self, own_redis: RedisServer) -> RedisServer:
        """A Redis of the test's own, to be stopped and started again."""
        return own_redis

    def test_waits_sit_it_out_and_those_who_do_not_wait_are_told(
        self, settings: Settings, redis_server: RedisServer, start_worker: StartWorker
    ) -> None:
        start_worker("slow")
        many = [f"text {at} " + "word " * 60 for at in range(20)]

        async def all_of(job: AsyncJob) -> Vectors:
            return np.concatenate([chunk.vectors async for chunk in job.iter_results()])

        async def main() -> None:
            job = await aenqueue_embeddings(many, hardware="slow", chunk_size=4, settings=settings)
            waited, read = asyncio.create_task(job.wait()), asyncio.create_task(all_of(job))
            while not (await job.status()).chunks_done:
                await asyncio.sleep(0)
            async with ticking():
                await asyncio.to_thread(redis_server.stop)
                with pytest.raises(ConnectionError, match="can't be reached"):
                    await job.status()
                gone = asyncio.create_task(job.wait())
                await asyncio.sleep(1)  # it finds nobody, and asks again
                gone.cancel()
                await asyncio.wait([gone], timeout=120)
                assert gone.cancelled()
                await asyncio.to_thread(redis_server.start)
                async with asyncio.timeout(PATIENCE_S):
                    status, vectors = await asyncio.gather(waited, read)
            assert status.state is JobState.COMPLETED
            np.testing.assert_array_equal(vectors, reference(many))

        asyncio.run(main())
