"""Queues with real tickets in them, and the overview of what is in Redis."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.queueing.tickets import Ticket, TicketSender
from embedctl.store import JobState, Queues
from embedctl.store.queues import Waiting
from embedctl.waiting import overview
from embedctl.waiting.overview import Gatherer
from embedctl_config import keys, wire
from embedctl_config.celery_app import make_celery
from embedctl_config.errors import JobError
from embedctl_config.settings import Settings
from tests.support.store import QUEUE, claim, new_job, pass_ms, row, work
from tests.support.waiting import PATIENCE_S

JOB = "20261121-073032-d974cc1efb"


@pytest.fixture
def sender(settings: Settings) -> Iterator[TicketSender]:
    """Sends tickets at 1, 2, 3 … seconds."""
    seconds = iter(range(1, 100))
    sender = TicketSender(make_celery(settings), lambda: next(seconds) * 1000)
    yield sender
    sender.close()


def waiting(broker: Broker) -> Waiting:
    (found,) = Queues(broker.connection).waiting([QUEUE])
    return found


def test_depth_and_age_are_those_of_the_tickets(broker: Broker) -> None:
    assert waiting(broker) == Waiting(0, None)
    before = broker.connection.now_ms()
    broker.tickets.send(QUEUE, JOB, [0, 1, 2])
    found = waiting(broker)
    assert found.tickets == 3
    assert found.sent_ms is not None
    assert before - 1 <= found.sent_ms <= broker.connection.now_ms() + 1


def test_the_age_is_that_of_the_ticket_which_celery_takes_next(
    broker: Broker, settings: Settings, sender: TicketSender
) -> None:
    for chunk in range(3):
        sender.send(QUEUE, JOB, [chunk])
    with make_celery(settings).connection_for_read() as connection, connection.SimpleQueue(QUEUE) as taken:
        for chunk, left in enumerate((2, 1, 0)):
            shown = waiting(broker)
            message = taken.get(timeout=PATIENCE_S)
            arguments, facts, _ = message.payload
            assert arguments == [JOB, chunk]
            assert shown == Waiting(left + 1, facts["sent_ms"]) == Waiting(left + 1, 1000 * (chunk + 1))
            if left:
                message.ack()
            else:
                message.requeue()  # as a worker that ends does
    assert waiting(broker) == Waiting(1, 3000)


@pytest.mark.parametrize(("facts", "age"), [({"sent_ms": 17}, 17), ({}, None)])
def test_a_ticket_that_is_sent_on_keeps_its_age(
    broker: Broker, sender: TicketSender, facts: dict[str, int], age: int | None
) -> None:
    sender.forward([Ticket(QUEUE, JOB, 0, {"version": 1, **facts})])
    assert waiting(broker) == Waiting(1, age)


def envelope(body: object, encoding: str = "base64") -> bytes:
    packed = base64.b64encode(json.dumps(body).encode()).decode()
    return json.dumps({"body": packed, "properties": {"body_encoding": encoding}}).encode()


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xfe",
        b"null",
        b'{"body": 7, "properties": {"body_encoding": "base64"}}',
        b'{"body": "!", "properties": {"body_encoding": "base64"}}',
        b"[" * 10_000,
        envelope([[], {"sent_ms": 17}], "rot13"),
        envelope({"sent_ms": 17}),
        *(envelope([[], {"sent_ms": value}]) for value in ("17", True, None, 1.5, -1, 10**400)),
        envelope([["x" * 20_000], {"sent_ms": 17}]),
    ],
)
def test_whatever_else_lies_in_a_queue_has_no_age(broker: Broker, raw: Redis, message: bytes) -> None:
    raw.lpush(QUEUE, message)
    assert waiting(broker) == Waiting(1, None)


def test_the_overview_holds_workers_queues_and_jobs(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, chunks=4)
    broker.send_issued(broker.jobs.status(job_id))
    claim(broker, job_id, 0, "t0")
    pass_ms(broker)
    work(broker, job_id, 1)
    done = new_job(broker, chunks=1)
    work(broker, done, 0)
    broker.workers.beat(row("w1", holding=((job_id, 0),)))
    broker.workers.beat(row("w2", "dummy", "other"))
    broker.workers.beat(row("lost"))
    raw.zadd(keys.WORKERS, {"lost": broker.connection.now_ms() - 5000})

    seen = Gatherer(broker).look()
    assert {(each.row.instance, each.encodes is not None) for each in seen.workers} == {("w1", True), ("w2", False)}
    assert [each.worker.instance for each in seen.gone] == ["lost"]
    assert seen.tokens_per_s == 100.0
    assert [(queue.hardware, queue.model, queue.tickets, queue.workers) for queue in seen.queues] == [
        ("dummy", "dummy", 4, 2),
        ("dummy", "other", 0, 1),
    ]
    assert seen.queues[0].oldest_s is not None
    assert 0 <= seen.queues[0].oldest_s < 600  # since this test began, and not since 1970
    assert seen.queues[1].oldest_s is None
    assert seen.tickets == 4

    (active,) = seen.active
    assert (active.job.id, active.job.live_workers, seen.active_count) == (job_id, 2, 1)
    # At the first look there is nothing to compare with but the job's start.
    assert active.job.started_at is not None
    seconds = (active.job.progressed_at - active.job.started_at).total_seconds()
    assert active.records_per_s == pytest.approx(2 / seconds)
    assert active.tokens_per_s == pytest.approx(10 / seconds)
    assert active.seconds_left == pytest.approx(6 / (2 / seconds))
    assert [(each.job.id, each.job.state, each.seconds_left) for each in seen.ended] == [
        (done, JobState.COMPLETED, None)
    ]


def test_the_pace_is_that_of_the_last_seconds(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    job_id = new_job(broker, chunks=5)
    broker.workers.beat(row())
    gatherer = Gatherer(broker)
    gatherer.look()
    work(broker, job_id, 0, 1)
    now[0] += 2
    (pace,) = gatherer.look().active
    assert (pace.records_per_s, pace.tokens_per_s, pace.seconds_left) == (2.0, 10.0, 3.0)


def test_a_growing_job_has_no_time_left_and_one_that_nobody_works_for_no_pace(broker: Broker) -> None:
    job_id = new_job(broker, chunks=3, seal=False)
    claim(broker, job_id, 0, "t0")
    pass_ms(broker)
    work(broker, job_id, 1)
    (pace,) = Gatherer(broker).look().active
    assert (pace.records_per_s, pace.tokens_per_s, pace.seconds_left) == (None, None, None)
    broker.workers.beat(row())
    (pace,) = Gatherer(broker).look().active
    assert pace.records_per_s
    assert pace.seconds_left is None


def test_of_many_jobs_those_in_hand_the_newest_and_the_oldest_are_looked_at(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "JOBS_LOOKED_AT", 4)
    monkeypatch.setattr(overview, "_NEWEST", 1)
    made = [new_job(broker, chunks=1, model=f"m{at}") for at in range(9)]
    for at, job_id in enumerate(made):
        raw.zadd(keys.ACTIVE, {job_id: at})
        raw.zadd(keys.JOBS, {job_id: at})
    claim(broker, made[4], 0)
    broker.workers.beat(row(holding=((made[4], 0),)))
    seen = Gatherer(broker).look()
    assert (len(seen.active), seen.active_count) == (4, 9)
    assert seen.active[0].job.id == made[4]
    assert [queue.model for queue in seen.queues] == ["dummy", "m0", "m1", "m4", "m7", "m8"]


def test_a_job_that_ends_while_one_looks_is_shown_as_ended(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "_NEWEST", 1)
    old, new = (new_job(broker, chunks=1, ttl_s=keys.UNENDED_TTL_S) for _ in range(2))
    raw.zadd(keys.JOBS, {old: 1, new: 2})
    gatherer = Gatherer(broker)
    assert {pace.job.id for pace in gatherer.look().active} == {old, new}
    work(broker, old, 0)
    seen = gatherer.look()
    assert ([pace.job.id for pace in seen.active], seen.active_count) == ([new], 1)
    assert [pace.job.id for pace in seen.ended] == [old]
    assert Gatherer(broker).look().ended == ()


def test_a_cancelled_job_is_not_active_though_it_still_needs_upkeep(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    broker.jobs.cancel(job_id)
    assert raw.zscore(keys.ACTIVE, job_id) is not None
    raw.zadd(keys.ACTIVE, {"20200101-000000-0000000000": 1})  # its time ran out
    seen = Gatherer(broker).look()
    assert (seen.active, seen.active_count) == ((), 0)
    assert [pace.job.state for pace in seen.ended] == [JobState.CANCELLED]


def test_a_job_of_another_version_hides_no_other(broker: Broker, raw: Redis) -> None:
    other, mine = new_job(broker), new_job(broker)
    raw.hset(keys.job(other), mapping={"version": 99, "state": "levitating"})
    assert [pace.job.id for pace in Gatherer(broker).look().active] == [mine]
    with pytest.raises(JobError, match=f"of version 99, and this embedctl handles version {wire.VERSION}"):
        broker.jobs.status(other)
