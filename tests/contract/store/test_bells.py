"""Bells: which steps ring, what one is worth that is lost or doubled, and when a queue that no job uses goes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty

import pytest
import redis as redis_py
from kombu.common import ignore_errors
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Claimant, unused
from embedctl.store.scripts import BELL
from embedctl_config import keys
from embedctl_config.celery_app import make_celery
from embedctl_config.settings import Settings
from tests.support.redis_server import RedisServer
from tests.support.store import (
    MINE,
    OTHER,
    QUEUE,
    add,
    audited,
    complete,
    lapse,
    new_job,
    reaped,
    row,
    take,
    take_all,
    work,
)
from tests.support.waiting import PATIENCE_S


def lose_a_lease(broker: Broker, raw: Redis, job_id: str) -> None:
    """As a Redis that restarts without its last writes."""
    raw.delete(keys.owners(job_id))
    audited(broker, job_id)


def let_lapse(broker: Broker, raw: Redis, job_id: str) -> None:
    lapse(raw, job_id, 0)
    reaped(broker, job_id)


def retry(broker: Broker, raw: Redis, job_id: str) -> None:
    complete(broker, job_id, 0, failed=1)
    raw.delete(QUEUE)
    broker.jobs.retry(job_id, 0, 1, "p")


#: What makes a chunk ready of a job whose first chunk is leased, and the number of its chunks.
STEPS: dict[str, tuple[int, Callable[[Broker, Redis, str], object]]] = {
    "release": (1, lambda broker, raw, job_id: broker.jobs.release(job_id, 0, "t", delay_s=0)),
    "reap": (1, let_lapse),
    "audit": (1, lose_a_lease),
    "retry": (1, retry),
    "complete": (2, lambda broker, raw, job_id: complete(broker, job_id, 0)),
    "next": (3, lambda broker, raw, job_id: take(broker, "u")),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_after_which_chunks_are_ready_rings(broker: Broker, raw: Redis, step: str) -> None:
    broker.workers.beat(row())
    chunks, take_step = STEPS[step]
    job_id = new_job(broker, chunks)
    assert take(broker) is not None
    raw.delete(QUEUE)
    take_step(broker, raw, job_id)
    assert raw.llen(QUEUE) > 0


def test_a_bell_waits_for_each_chunk_but_no_more_than_workers_hear_soon(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3, seal=False)
    assert raw.llen(QUEUE) == 0  # nobody would hear it
    for workers in (1, 2):
        broker.workers.beat(row(f"w{workers}"))
        for chunk in range(3 * workers, 3 * workers + 3):
            add(broker, job_id, chunk)
        assert raw.llen(QUEUE) == (3, 6)[workers - 1]
    for chunk in range(9, 20):
        add(broker, job_id, chunk)
    assert raw.llen(QUEUE) == 8


def test_who_takes_the_last_chunk_rings_for_nobody(broker: Broker, raw: Redis) -> None:
    new_job(broker, 1)
    broker.workers.beat(row())
    assert take(broker) is not None
    broker.jobs.ring("fp32", {QUEUE: MINE})
    assert raw.llen(QUEUE) == 0


def test_a_lost_bell_is_rung_again_for_a_worker_that_can_take_what_is_ready(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2)
    broker.workers.beat(row())
    broker.jobs.ring("fp16", {QUEUE: MINE})
    broker.jobs.ring("fp32", {f"{QUEUE}-too": MINE})
    assert raw.llen(QUEUE) == 0
    for _ in range(2):
        broker.jobs.ring("fp32", {QUEUE: MINE})
        assert raw.llen(QUEUE) == 1
    work(broker, job_id, 0)  # so it is pinned
    raw.delete(QUEUE)
    broker.jobs.ring("fp32", {QUEUE: OTHER})
    assert raw.llen(QUEUE) == 0
    broker.jobs.ring("fp32", {QUEUE: MINE})
    assert raw.llen(QUEUE) == 1


def test_a_worker_that_hears_the_bell_of_another_ones_chunk_rings_for_it(broker: Broker, raw: Redis) -> None:
    work(broker, new_job(broker, 2), 0)
    broker.workers.beat(row())
    given = broker.jobs.next(QUEUE, "u", Claimant("other", OTHER, "fp32"))
    assert (given.claims, given.later, raw.llen(QUEUE)) == ([], True, 1)
    assert take(broker, "v") is not None


def test_the_list_of_another_program_under_a_queues_name_holds_up_no_job(broker: Broker, raw: Redis) -> None:
    raw.set(QUEUE, "somebody else's")
    broker.workers.beat(row())
    job_id = new_job(broker, 2)
    broker.jobs.ring("fp32", {QUEUE: MINE})
    work(broker, job_id, 0, 1)
    assert broker.jobs.status(job_id).state.ended
    assert raw.get(QUEUE) == b"somebody else's"


def lists(raw: Redis) -> list[bytes]:
    return [key for kind in ("flows", "left", "wait") for key in raw.scan_iter(match=keys.turns(f"{kind}:*"))]


@pytest.mark.parametrize("first", [None, 1, 0], ids=["lease", "claim", "first claim"])
@pytest.mark.parametrize("lost", ["flows", "kinds"])
def test_a_result_that_redis_has_no_claim_of_leaves_no_list_that_nobody_comes_by(
    broker: Broker, raw: Redis, lost: str, first: int | None
) -> None:
    job_id = new_job(broker, 2, seal=False)
    assert take_all(broker) == [0, 1]
    raw.hdel(keys.owners(job_id), *map(str, range(first or 0, 2)))  # as a Redis that restarts without its last writes
    if first is not None:
        raw.hset(keys.job(job_id), "next", str(first))
    if first == 0:
        raw.hdel(keys.job(job_id), "model_fingerprint", "pinned_by")
    audited(broker, job_id)
    assert lists(raw)
    raw.delete(*raw.scan_iter(match=keys.turns(f"{lost}:*")))
    complete(broker, job_id, 1)
    complete(broker, job_id, 0)
    broker.jobs.seal(job_id, 2)
    assert broker.jobs.status(job_id).state == "completed"
    assert not lists(raw)


BINDINGS = unused.bindings([QUEUE])
DAY_MS, KEPT_MS = 24 * 3600 * 1000, keys.QUEUE_KEPT_S * 1000


def sweep(broker: Broker, *, later_ms: int = 0) -> None:
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


def test_a_connection_that_is_lost_with_bells_in_hand_is_closed_as_celery_closes_it(
    settings: Settings, own_redis: RedisServer
) -> None:
    """Whatever else than a connection error is raised ends the worker. Kombu gives up at the first of two channels that
    it can't close, and goes on at the next attempt, without an address by then."""
    app = make_celery(settings.replace(redis_url=own_redis.url))
    with app.connection_for_read() as connection, redis_py.Redis.from_url(own_redis.url) as raw:
        heard = connection.SimpleQueue(QUEUE)
        also = connection.SimpleQueue(f"{QUEUE}-too", channel=connection.channel())
        raw.lpush(QUEUE, BELL)
        message = heard.get(timeout=PATIENCE_S)
        for queue in (heard, also):
            with pytest.raises(Empty):
                queue.get(timeout=0.1)  # so that it waits for an answer, which never comes
        assert own_redis.process is not None
        own_redis.process.kill()
        own_redis.process.wait()
        for close in (connection.collect, connection.close):
            ignore_errors(connection, close)
            message.ack_log_error(logging.getLogger(), connection.connection_errors)


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
