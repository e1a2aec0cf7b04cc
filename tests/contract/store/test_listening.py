"""Tasks of event loops that wait for jobs: they hear events, and neither poll nor leave anything behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from redis import Redis

from embedctl import AsyncJob, Job, JobState
from embedctl.queueing import listening as listening_module
from embedctl.queueing.broker import Broker
from embedctl_config.settings import Settings
from tests.support.redis_server import RedisServer
from tests.support.store import calls, new_job, row, work
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.in_redis


def work_on_first(broker: Broker, job_id: str) -> None:
    work(broker, job_id, 0)


def listeners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "embedctl-events"]


@pytest.fixture(autouse=True)
def _no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_module, "_IDLE_S", 0.1)
    eventually(lambda: not listeners())


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Tasks look each third of a lease, whatever happens."""
    return settings.replace(lease_s=3000.0)


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that hears nothing looks at its job only after the test has failed, and reads end as late."""
    monkeypatch.setattr("embedctl.waiting.waiter.LOOK_EVERY_S", 3600.0)
    monkeypatch.setattr("embedctl.store.connection._SOCKET_TIMEOUT_S", 3600)
    monkeypatch.setattr(listening_module, "_BLOCK_MS", 3_600_000)


@pytest.fixture
def job(broker: Broker) -> Job:
    broker.workers.beat(row())
    return Job(new_job(broker, 1), broker)


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, condition)


async def blocked(broker: Broker) -> None:
    """Wait until the thread is in a read."""
    await until(lambda: broker.listener._reads is not None)


def test_a_waiting_task_looks_no_oftener_than_each_second(broker: Broker, job: Job, raw: Redis) -> None:
    async def main() -> float:
        waiting = asyncio.create_task(AsyncJob(job).wait())
        await blocked(broker)
        raw.config_resetstat()
        began = time.monotonic()
        await until(lambda: calls(raw, "hgetall") >= 2)
        asked, passed_s = calls(raw, "hgetall"), time.monotonic() - began
        await asyncio.to_thread(work, broker, job.id, 0)
        assert (await waiting).state is JobState.COMPLETED
        return asked / passed_s

    # Once a second by the task, and now and then by the reaper. A busy machine only makes it less.
    assert asyncio.run(main()) <= 2


def test_a_hundred_tasks_share_a_thread_and_few_connections(no_looks: None, broker: Broker, raw: Redis) -> None:
    broker.workers.beat(row())
    jobs = [new_job(broker, 1) for _ in range(20)]
    before = raw.info("clients")["connected_clients"]

    async def main() -> None:
        waiting = [asyncio.create_task(AsyncJob(Job(jobs[at % 20], broker)).wait()) for at in range(100)]
        await until(lambda: len(broker.listener._waiting) == 100)
        assert len(listeners()) == 1
        assert raw.info("clients")["connected_clients"] < before + 30
        await asyncio.to_thread(lambda: [*map(partial(work_on_first, broker), jobs)])
        ended = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
        assert {status.state for status in ended} == {JobState.COMPLETED}
        assert not broker.listener._waiting

    asyncio.run(main())


def test_few_tasks_wait_for_results_in_threads_of_their_own(broker: Broker) -> None:
    broker.workers.beat(row())
    jobs = [Job(new_job(broker, 1), broker, sealed_with=1) for _ in range(listening_module.THREADS + 4)]

    async def main() -> None:
        waiting = [asyncio.create_task(AsyncJob(job).results()) for job in jobs]
        await until(lambda: len(broker.listener._waiting) == 4)
        waiting.pop(0).cancel()  # its thread sees that within a second
        await until(listening_module._waiting_threads().has_room)
        await asyncio.to_thread(lambda: [*map(partial(work_on_first, broker), (job.id for job in jobs[1:]))])
        assert [len(await task) for task in waiting] == [1] * (len(jobs) - 1)

    asyncio.run(main())
    assert listening_module._waiting_threads().has_room()


def test_a_new_task_does_not_wait_for_the_read_that_goes_on(no_looks: None, broker: Broker) -> None:
    broker.workers.beat(row())
    first, second = new_job(broker, 1), new_job(broker, 1)

    async def main() -> None:
        waits = asyncio.create_task(AsyncJob(Job(first, broker)).wait())
        await blocked(broker)
        later = asyncio.create_task(AsyncJob(Job(second, broker)).wait())
        await until(lambda: len(broker.listener._waiting) == 2)
        await asyncio.to_thread(work, broker, second, 0)
        await asyncio.wait_for(later, PATIENCE_S)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await asyncio.to_thread(broker.listener.hurry)

    asyncio.run(main())


def test_a_task_hears_its_event_before_the_read_is_known_to_have_ended(
    no_looks: None, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.workers.beat(row())
    first, second = new_job(broker, 1), new_job(broker, 1)
    hurrying, over = threading.Event(), threading.Event()

    def hurry() -> None:
        hurrying.set()
        over.wait()

    monkeypatch.setattr(broker.listener, "hurry", hurry)

    async def main() -> None:
        waits = asyncio.create_task(AsyncJob(Job(first, broker)).wait())
        await blocked(broker)
        later = asyncio.create_task(AsyncJob(Job(second, broker)).wait())
        await until(hurrying.is_set)
        for job_id, task in ((first, waits), (second, later)):
            await asyncio.to_thread(work, broker, job_id, 0)
            await asyncio.wait_for(task, PATIENCE_S)

    try:
        asyncio.run(main())
    finally:
        over.set()


def test_a_cancelled_task_leaves_nothing_behind(broker: Broker, job: Job) -> None:
    async def main() -> None:
        waiting = [asyncio.create_task(AsyncJob(job).wait()) for _ in range(20)]
        await until(lambda: len(broker.listener._waiting) == 20)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not broker.listener._waiting
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    eventually(lambda: not listeners())
    pool = broker.connection._redis.connection_pool
    eventually(lambda: not pool._in_use_connections)


def test_a_loop_closed_around_waits_is_forgotten(broker: Broker, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_module, "_BLOCK_MS", 100)
    loop = asyncio.new_event_loop()
    listener = broker.listener

    async def wait() -> None:
        await AsyncJob(job).wait()

    loop.create_task(wait())._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.run_until_complete(blocked(broker))
    assert listener._waiting
    loop.close()
    eventually(lambda: not listener._waiting)
    eventually(lambda: not listeners())


def test_a_redis_that_restarts_is_heard_again(own_redis: RedisServer, own_broker: Broker) -> None:
    broker = own_broker
    broker.workers.beat(row())
    job_id = new_job(broker, 1)

    async def main() -> None:
        waiting = asyncio.create_task(AsyncJob(Job(job_id, broker)).wait())
        await blocked(broker)
        await asyncio.to_thread(own_redis.stop)
        await until(lambda: broker.listener._reads is None)
        await asyncio.to_thread(own_redis.start)
        await asyncio.to_thread(work, broker, job_id, 0)
        assert (await asyncio.wait_for(waiting, PATIENCE_S)).state is JobState.COMPLETED

    asyncio.run(main())


def test_a_child_has_a_listener_of_its_own(broker: Broker, job: Job) -> None:
    async def main() -> int:
        waiting = asyncio.create_task(AsyncJob(job).wait())
        await blocked(broker)
        child = os.fork()
        if child == 0:
            os._exit(0 if broker.listener.process == os.getpid() and not broker.listener._waiting else 1)
        await asyncio.to_thread(work, broker, job.id, 0)
        await asyncio.wait_for(waiting, PATIENCE_S)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert asyncio.run(main()) == 0
