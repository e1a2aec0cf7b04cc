"""The reaper's rounds: one process at a time, not too soon after Redis started, and lapsed leases really end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from redis import Redis

from embedctl import Job, JobCancelled
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl_config import keys
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.settings import Settings
from tests.support.redis_server import RedisServer
from tests.support.store import QUEUE, claim, new_job, pass_ms, row, take_all
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.waits import WAITS


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The shortest lease: the Redis of these tests has been up for longer than two of them."""
    return settings.replace(lease_s=0.5)


@pytest.fixture
def broker(settings: Settings) -> Iterator[Broker]:
    broker = Broker.connect(settings)
    eventually(lambda: broker.connection.uptime_s() >= 1)
    yield broker
    broker.close()


def reap(broker: Broker, **options: float) -> None:
    """Run one round, whichever reaper had the last turn. All active jobs are due."""
    with broker.connection.client() as client:
        client.delete(keys.REAPER)
        for job_id in client.zrange(keys.UPKEEP, 0, -1):
            client.zadd(keys.UPKEEP, {job_id: 1})
    Reaper(broker, **options).round()


@pytest.mark.parametrize("call", ["wait", "await wait_until_sealed", "async for iter_results"])
def test_every_call_that_waits_for_a_job_reaps(broker: Broker, raw: Redis, call: str) -> None:
    broker.workers.beat(row())
    job_id = new_job(broker, 1, seal=False)
    assert claim(broker, job_id, 0) is not None
    raw.delete(QUEUE)

    def wait() -> None:
        with suppress(JobCancelled):
            WAITS[call](Job(job_id, broker), None)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    # The owner's lease lapses, and nobody knows the owner.
    eventually(lambda: raw.llen(QUEUE) == 1)
    broker.jobs.cancel(job_id)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_a_turn_is_one_processs_and_prolonged_and_shortened_by_its_token_alone(broker: Broker, raw: Redis) -> None:
    token = broker.upkeep.agenda.take_turn(60)
    assert not broker.upkeep.agenda.take_turn(60)
    assert not broker.upkeep.agenda.keep_turn("another", 600)
    assert raw.pttl(keys.REAPER) <= 60_000
    assert broker.upkeep.agenda.keep_turn(token, 600)
    assert raw.pttl(keys.REAPER) > 60_000
    assert broker.upkeep.agenda.keep_turn(token, 0)
    eventually(lambda: broker.upkeep.agenda.take_turn(60))
    assert not broker.upkeep.agenda.keep_turn(token, 60)


def test_a_reaper_rests_without_asking_redis(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    reaper = Reaper(broker, interval_s=60)
    reaper.round()
    raw.delete(keys.REAPER)
    reaper.round()
    assert not raw.exists(keys.REAPER)


def test_nobody_reaps_in_the_first_two_leases_after_redis_started(own_redis: RedisServer, settings: Settings) -> None:
    young = Broker.connect(settings.replace(redis_url=own_redis.url, lease_s=1.0))
    eventually(lambda: young.upkeep.agenda.take_turn(0.001))
    assert young.connection.uptime_s() >= 2
    patient = Broker.connect(settings.replace(redis_url=own_redis.url, lease_s=60.0))
    assert not patient.upkeep.agenda.take_turn(0.001)
    for broker in (young, patient):
        broker.close()


def test_a_round_audits_a_job_that_rests(broker: Broker, raw: Redis) -> None:
    """Also one that is being submitted: its producer may wait for the room that a lost chunk takes."""
    broker.workers.beat(row())
    rests, submitting = new_job(broker, 2), new_job(broker, 2, seal=False)
    for job_id in (rests, submitting):
        raw.delete(keys.chunk_input(job_id, 1))
    take_all(broker)
    reap(broker, audit_after_s=3600)
    assert broker.jobs.status(rests).lost_chunks is None
    pass_ms(broker, 10)
    reap(broker, audit_after_s=0)
    assert broker.jobs.status(rests).lost_chunks == (1, 1)
    assert broker.jobs.status(submitting).lost_chunks == (1, 1)


def test_a_round_without_redis_says_so_and_the_next_goes_on(own_redis: RedisServer, own_broker: Broker) -> None:
    broker = own_broker
    job_id = new_job(broker, 1)
    claim(broker, job_id, 0)
    own_redis.stop()
    reaper = Reaper(broker, interval_s=0.01)
    with pytest.raises(BrokerUnavailable):
        reaper.round()
    own_redis.start()
    eventually(lambda: broker.connection.uptime_s() >= 1)

    def reaps() -> bool:
        reaper.round()
        return broker.jobs.status(job_id).lapsed == 1

    eventually(reaps)
