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
from embedctl.store import upkeep
from embedctl_config import keys
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


def begins(one: Reaper, raw: Redis) -> bool:
    """Whether a reaper that is asked now takes the turn."""
    raw.delete(keys.REAPER)
    one.round()
    return raw.exists(keys.REAPER) == 1


@pytest.mark.parametrize(("lease_s", "interval_s"), [(300.0, 5.0), (9.0, 3.0)])
def test_when_rounds_begin(
    settings: Settings, raw: Redis, monkeypatch: pytest.MonkeyPatch, lease_s: float, interval_s: float
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("embedctl.queueing.reaper._now", lambda: clock[0])
    broker = Broker.connect(settings.replace(lease_s=lease_s))
    one, begun = Reaper(broker), []
    slept_s = interval_s + lease_s
    # After the last time, it has stood still for too long, and rests for two leases.
    for passes_s in (0, interval_s - 0.25, 0.25, slept_s, slept_s + 0.25, lease_s, lease_s - 0.25, 0.25):
        clock[0] += passes_s
        begun.append(begins(one, raw))
    assert begun == [True, False, True, True, False, False, False, True]
    one, other = (Reaper.of_many(broker) for _ in range(2))
    assert [begins(each, raw) for each in (one, other, Reaper(broker))] == [True, False, True]
    broker.close()


def test_nobody_reaps_in_the_first_two_leases_after_redis_started(own_redis: RedisServer, settings: Settings) -> None:
    young = Broker.connect(settings.replace(redis_url=own_redis.url, lease_s=1.0))
    eventually(lambda: young.upkeep.agenda.take_turn(0.001))
    assert young.connection.uptime_s() >= 2
    patient = Broker.connect(settings.replace(redis_url=own_redis.url, lease_s=60.0))
    assert not patient.upkeep.agenda.take_turn(0.001)
    for broker in (young, patient):
        broker.close()


def test_rounds_audit_a_job_that_rests(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slice by slice. Also one that is being submitted: its producer may wait for the room that a lost chunk takes."""
    monkeypatch.setattr(upkeep, "_SLICE", 1)
    broker.workers.beat(row())
    rests, submitting = new_job(broker, 2), new_job(broker, 2, seal=False)
    for job_id in (rests, submitting):
        raw.delete(keys.chunk_input(job_id, 1))
    take_all(broker)
    reap(broker, audit_after_s=3600)
    assert broker.jobs.status(rests).lost_chunks is None
    pass_ms(broker, 10)
    for lost in (None, (1, 1)):
        reap(broker, audit_after_s=0, interval_s=60.0)
        for job_id in (rests, submitting):
            assert broker.jobs.status(job_id).lost_chunks == lost
            assert (f"job {job_id}: Redis lost 1 of its chunks" in caplog.text) is (lost is not None)
