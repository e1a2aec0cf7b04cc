"""A ticket that is still in its queue is not sent again, and one that is lost always is, whatever the queue says."""

from __future__ import annotations

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.queueing.tickets import Ticket
from embedctl.store import heads
from embedctl.store.heads import Heads
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.limits import limited
from tests.support.store import OTHER, QUEUE, claim, new_job, overdue, row, score

MINUTE_MS, HOUR_MS = 60_000, 3_600_000


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return limited(settings.replace(lease_s=30.0), reissue_s=60.0, window=2)


@pytest.fixture(autouse=True)
def worker(old_redis: None, broker: Broker) -> None:
    """One that takes nothing."""
    broker.workers.beat(row())


def queued(broker: Broker, jobs: int) -> list[str]:
    """So many jobs of one chunk each, with their tickets in the queue."""
    made = [new_job(broker, 1) for _ in range(jobs)]
    for job_id in made:
        broker.send_issued(broker.jobs.status(job_id))
    return made


def tickets_sent_ago(broker: Broker, count: int, ago_ms: int, queue: str = QUEUE) -> None:
    """Tickets at the end of the queue where none is taken soon, of jobs that were made long ago."""
    sent_ms = broker.connection.now_ms() - ago_ms
    broker.tickets.forward(
        [Ticket(queue, f"20200101-000000-{at:010d}", 0, {"version": 1, "sent_ms": sent_ms}) for at in range(count)]
    )


def age(broker: Broker, raw: Redis, job_id: str, by_ms: int) -> None:
    """As if a chunk's only ticket had been sent so long ago, and were overdue."""
    raw.zadd(keys.due(job_id), {"0": broker.connection.now_ms() - by_ms + MINUTE_MS + 0.5})


def reap(broker: Broker, raw: Redis, *jobs: str) -> None:
    raw.delete(keys.REAPER)
    for job_id in jobs:
        raw.zadd(keys.UPKEEP, {job_id: 1})
    Reaper(broker).round()


def test_a_long_queue_is_not_made_longer(broker: Broker, raw: Redis) -> None:
    tickets_sent_ago(broker, 11, 3 * HOUR_MS)
    jobs = queued(broker, 15)
    for times in range(1, 5):
        for job_id in jobs:
            raw.zadd(keys.due(job_id), {"0": score(raw, keys.due(job_id), 0) - 2 * HOUR_MS})
        reap(broker, raw, *jobs)
        assert raw.llen(QUEUE) == 26
        assert raw.hget(keys.reissues(jobs[0]), 0) == str(times).encode()  # ever later, as if it had been sent
    assert {broker.jobs.status(job_id).state for job_id in jobs} == {"queued"}


@pytest.mark.parametrize(
    ("sent_ago", "again"),
    [
        pytest.param([(20, HOUR_MS)], 0, id="it would be behind these"),
        pytest.param([(20, 10 * MINUTE_MS)], 1, id="the queue has come to its place"),
        pytest.param(
            [(9, 48 * HOUR_MS), (10, MINUTE_MS)], 1, id="poison, forwarded with the time of its first sending"
        ),
    ],
)
def test_a_ticket_that_was_lost_is_sent_again_in_its_place(
    broker: Broker, raw: Redis, sent_ago: list[tuple[int, int]], again: int
) -> None:
    (job_id,) = queued(broker, 1)
    raw.delete(QUEUE)
    for count, ago_ms in sent_ago:
        tickets_sent_ago(broker, count, ago_ms)
    age(broker, raw, job_id, 30 * MINUTE_MS)
    reap(broker, raw, job_id)
    assert raw.llen(QUEUE) == sum(count for count, _ in sent_ago) + again


def test_in_a_short_queue_every_ticket_is_sent_again(broker: Broker, raw: Redis) -> None:
    jobs = queued(broker, 3)
    overdue(raw, jobs[2], 0)
    age(broker, raw, jobs[2], MINUTE_MS + 1000)
    reap(broker, raw, jobs[2])
    assert raw.llen(QUEUE) == 4


def test_a_sender_whose_clock_is_wrong_proves_no_more_than_its_jobs_do(broker: Broker, raw: Redis) -> None:
    (job_id,) = queued(broker, 1)
    raw.delete(QUEUE)
    others = [new_job(broker, 1) for _ in range(11)]
    broker.tickets.forward([Ticket(QUEUE, other, 0, {"version": 1, "sent_ms": 5}) for other in others])
    age(broker, raw, job_id, 30 * MINUTE_MS)
    reap(broker, raw, job_id)
    assert raw.llen(QUEUE) == 12


def test_a_queue_that_stands_still_though_it_has_workers_proves_nothing_after_half_an_hour(
    broker: Broker, raw: Redis
) -> None:
    tickets_sent_ago(broker, 11, 3 * HOUR_MS)
    (job_id,) = queued(broker, 1)
    now_ms, told = broker.connection.now_ms(), Heads(broker.connection)
    sent_ms = now_ms - 3 * HOUR_MS
    for after_ms in (0, 10 * MINUTE_MS, 29 * MINUTE_MS):
        assert told.taken_before([QUEUE], now_ms + after_ms)[QUEUE] == pytest.approx(sent_ms - 10_000, abs=2000)
    assert told.taken_before([QUEUE], now_ms + 31 * MINUTE_MS)[QUEUE] == heads._ANY_MS
    for _ in range(5):  # as soon as it moves, it tells
        raw.rpop(QUEUE)
    tickets_sent_ago(broker, 11, 2 * HOUR_MS)
    assert told.taken_before([QUEUE], now_ms + 32 * MINUTE_MS)[QUEUE] < now_ms
    assert raw.pttl(keys.NOTES) > 0
    assert broker.jobs.status(job_id).state == "queued"


def test_a_queue_without_workers_stands_still_for_no_longer_than_they_are_back(broker: Broker, raw: Redis) -> None:
    tickets_sent_ago(broker, 11, 3 * HOUR_MS)
    now_ms, told = broker.connection.now_ms(), Heads(broker.connection)
    told.taken_before([QUEUE], now_ms)
    told.standing_still([QUEUE])
    assert told.taken_before([QUEUE], now_ms + 40 * MINUTE_MS)[QUEUE] < now_ms
    assert told.taken_before([QUEUE], now_ms + 3 * HOUR_MS)[QUEUE] < now_ms  # nobody asked in between


def test_a_chunk_whose_ticket_was_answered_gets_another_at_once(broker: Broker, raw: Redis) -> None:
    """Whatever the queue says: refused for its weights, given back, or its lease lapsed."""
    tickets_sent_ago(broker, 11, 3 * HOUR_MS)
    refused, released, lapsed = queued(broker, 3)
    raw.hset(keys.job(refused), "model_fingerprint", "cc" * 32)
    assert claim(broker, refused, 0, fingerprint=OTHER).answer == "mismatch"
    claim(broker, released, 0)
    broker.jobs.release(released, 0, "t", delay_s=10)
    claim(broker, lapsed, 0)
    for job_id in (refused, released, lapsed):
        raw.zadd(keys.due(job_id), {"0": score(raw, keys.due(job_id), 0) - MINUTE_MS})
    reap(broker, raw, refused, released, lapsed)
    assert raw.llen(QUEUE) == 17


@pytest.mark.parametrize("trash", [b"trash", b"[]", b'{"body": "e30=", "properties": {"body_encoding": "base64"}}'])
def test_what_is_no_ticket_tells_nothing(broker: Broker, raw: Redis, trash: bytes) -> None:
    raw.lpush(QUEUE, *[trash] * 12)
    assert Heads(broker.connection).taken_before([QUEUE], broker.connection.now_ms()) == {QUEUE: heads._ANY_MS}
