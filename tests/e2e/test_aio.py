"""Submitting and waiting without blocking an event loop, with a real Redis and real workers."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import redis as redis_py

from embedctl import AsyncJob, JobNotFound, JobState, JobStatus, JobUnfinished, aenqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl.queueing.listening import in_own_thread
from embedctl_config.settings import Settings
from tests.support.jobs import active_job_id, reference
from tests.support.store import active_jobs
from tests.support.waiting import eventually
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


def test_the_whole_way_awaited(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()
    texts = [f"text {at}" for at in range(2000)]
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
        assert [label async for chunk in same.iter_results(start=19) for label in chunk.ids] == list(range(1900, 2000))
        assert [(error.id, error.code) async for error in same.iter_errors()] == [(7, "empty")]
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


async def async_texts() -> AsyncIterator[str]:
    for at in itertools.count():
        await asyncio.sleep(0.005)  # it has no end: without a pause, it would fill Redis
        yield f"text {at}"


def texts() -> Iterator[str]:
    for at in itertools.count():
        time.sleep(0.005)  # as above
        yield f"text {at}"


@pytest.mark.parametrize(("source", "key"), [(texts, "k"), (async_texts, None)])
def test_a_cancelled_submission(
    source: Callable[[], Any], key: str | None, settings: Settings, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions: list[Future[Any]] = []

    def noted(work: Callable[[], Any]) -> Future[Any]:
        submissions.append(in_own_thread(work))
        return submissions[-1]

    monkeypatch.setattr("embedctl.jobs.aio.in_own_thread", noted)

    async def main() -> None:
        endless = aenqueue_embeddings(source(), chunk_size=10, idempotency_key=key, settings=settings)
        submitting = asyncio.create_task(endless)
        await until(lambda: list(active_jobs(broker)))
        job_id = active_job_id(broker)
        await until(lambda: broker.jobs.status(job_id).records >= 20)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await until(lambda: submissions[0].done())
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
