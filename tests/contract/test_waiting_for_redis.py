"""Those who wait while Redis is full, away or hangs: for no longer than told, and not in silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis as redis_py

from embedctl import Job, JobStalled, JobState, WaitTimeout, enqueue_embeddings
from embedctl.broker import Broker
from embedctl_config import keys
from embedctl_config.errors import BrokerFull
from embedctl_config.settings import Settings
from tests.conftest import RedisServer
from tests.contract.helpers import add, eventually, new_job, work


@pytest.fixture
def settings(own_redis: RedisServer, settings: Settings) -> Settings:
    """A Redis that a test may fill, stop and hold."""
    return settings.replace(redis_url=own_redis.url)


@pytest.fixture
def raw(own_redis: RedisServer) -> Iterator[redis_py.Redis]:
    client = redis_py.Redis.from_url(own_redis.url)
    yield client
    client.close()


def fill(raw: redis_py.Redis) -> None:
    raw.config_set("maxmemory", 1)


def make_room(raw: redis_py.Redis) -> None:
    raw.config_set("maxmemory", 0)


def test_a_full_redis_lets_a_producer_keep_its_right_and_store_nothing(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(broker, 1, seal=False)
    assert broker.jobs.hold(job_id, "p", lease_s=5)
    fill(raw)
    assert broker.jobs.hold(job_id, "p", lease_s=500)
    assert raw.ttl(keys.producer(job_id)) > 400
    assert not broker.jobs.hold(job_id, "another")
    with pytest.raises(BrokerFull):
        add(broker, job_id, 1)
    raw.delete(keys.producer(job_id))
    with pytest.raises(BrokerFull):
        broker.jobs.hold(job_id, "p")
    make_room(raw)
    assert broker.jobs.status(job_id).chunks == 1


def test_a_producer_that_waits_for_a_full_redis_is_not_called_dead(
    settings: Settings, broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "PRODUCER_LEASE_S", 1)
    full, jobs = threading.Event(), []

    def texts() -> Iterator[str]:
        yield from ("text 0 0", "text 0 1", "text 1 0")
        full.wait()
        yield "text 1 1"

    def submit() -> None:
        jobs.append(enqueue_embeddings(texts(), settings=settings.replace(chunk_size=2), hardware="dummy"))

    producer = threading.Thread(target=submit, daemon=True)
    producer.start()
    eventually(lambda: raw.zcard(keys.JOBS), 60)
    [job_id] = [name.decode() for name in raw.zrange(keys.JOBS, 0, -1)]
    eventually(lambda: broker.jobs.status(job_id).chunks == 1, 20)
    work(broker, job_id, 0)
    fill(raw)
    full.set()
    with pytest.raises(WaitTimeout):  # and not JobStalled
        Job(job_id, broker).wait(4)
    make_room(raw)
    producer.join(20)
    assert jobs[0].status().records == 4


def test_nobody_is_called_dead_while_redis_is_full(
    broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer may have lost its right before Redis was full, and can't take it again."""
    monkeypatch.setattr(keys, "PRODUCER_LEASE_S", 1)
    job_id = new_job(broker, 1, seal=False)
    work(broker, job_id, 0)
    raw.delete(keys.producer(job_id))
    fill(raw)
    with pytest.raises(WaitTimeout):
        Job(job_id, broker).wait(3)
    make_room(raw)
    with pytest.raises(JobStalled):
        Job(job_id, broker).wait(20)
