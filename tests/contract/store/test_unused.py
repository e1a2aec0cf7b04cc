"""Queues that no job uses any more: their bells and bindings are removed, and nothing that anybody needs."""

from __future__ import annotations

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import unused
from embedctl_config import keys
from embedctl_config.celery_app import make_celery
from embedctl_config.settings import Settings
from tests.support.store import MINE, QUEUE, new_job, row
from tests.support.waiting import PATIENCE_S

BINDINGS = unused.bindings([QUEUE])
DAY_MS, KEPT_MS = 24 * 3600 * 1000, keys.QUEUE_KEPT_S * 1000


def sweep(broker: Broker, *, later_ms: int = 0) -> None:
    """The reaper's part of one round."""
    now_ms = broker.connection.now_ms() + later_ms
    broker.upkeep.queues.sweep(now_ms, in_use=broker.upkeep.agenda.drop_names())


def test_bells_that_no_worker_hears_are_removed_and_one_that_comes_rings_for_itself(broker: Broker, raw: Redis) -> None:
    broker.workers.beat(row())
    new_job(broker, 1)
    sweep(broker)
    assert raw.exists(QUEUE)
    broker.workers.leave(row())
    sweep(broker)
    assert not raw.exists(QUEUE)
    broker.workers.beat(row())
    broker.jobs.ring("fp32", {QUEUE: MINE})
    assert raw.llen(QUEUE) == 1


def test_a_queue_is_forgotten_when_it_has_had_no_job_for_long(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1)
    raw.sadd(BINDINGS[0], "as kombu says it")
    sweep(broker, later_ms=KEPT_MS + DAY_MS)
    assert raw.zscore(keys.QUEUES, QUEUE) is not None  # of a job, which just waits
    raw.zadd(keys.QUEUES, {QUEUE: broker.connection.now_ms()})
    raw.delete(keys.job(job_id))
    sweep(broker, later_ms=KEPT_MS - DAY_MS)
    assert raw.zscore(keys.QUEUES, QUEUE) is not None
    assert raw.exists(*BINDINGS) == 1
    sweep(broker, later_ms=KEPT_MS + DAY_MS)
    assert raw.zscore(keys.QUEUES, QUEUE) is None
    assert not raw.exists(*BINDINGS)


def test_a_consumer_of_a_forgotten_queue_hears_bells(broker: Broker, raw: Redis, settings: Settings) -> None:
    with make_celery(settings).connection_for_read() as connection, connection.SimpleQueue(QUEUE) as heard:
        assert raw.exists(*BINDINGS)
        broker.upkeep.queues.mark([QUEUE], 1)
        sweep(broker)
        assert not raw.exists(*BINDINGS)
        broker.workers.beat(row())
        new_job(broker, 1)
        message = heard.get(timeout=PATIENCE_S)
        message.ack()
    assert message.headers["task"] == keys.TASK
    assert message.payload[:2] == [[], {}]


def test_rounds_are_bounded_and_get_to_every_queue(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused, "_QUEUES", 3)
    queues = [f"{QUEUE}-{at}" for at in range(7)]
    for queue in queues:
        raw.lpush(queue, "bell")
    broker.upkeep.queues.mark(queues, 1)
    left = [7]
    while left[-1]:
        sweep(broker)
        left.append(raw.exists(*queues))
        assert 0 <= left[-2] - left[-1] <= 3
        assert len(left) < 10


def test_a_key_of_another_program_stops_nothing(broker: Broker, raw: Redis) -> None:
    other = "embed.dummy.other"
    broker.upkeep.queues.mark([other, QUEUE], broker.connection.now_ms())
    raw.set(other, "theirs")
    raw.lpush(QUEUE, "bell")
    broken = new_job(broker, 0)
    raw.delete(keys.job(broken))
    raw.set(keys.job(broken), "theirs")
    sweep(broker)
    assert raw.get(other) == b"theirs"
    assert not raw.exists(QUEUE)
    assert raw.zscore(keys.JOBS, broken) is not None
