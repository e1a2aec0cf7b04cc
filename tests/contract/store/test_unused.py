"""Queues that no job uses any more: their tickets and bindings are removed, and nothing that anybody needs."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from embedctl.queueing.tickets import Ticket
from redis import Redis

from embedctl import Job
from embedctl.queueing.broker import Broker
from embedctl.store import Upkeep, unused
from embedctl.store.unused import UnusedQueues
from embedctl_config import keys, wire
from embedctl_config.celery_app import make_celery
from embedctl_config.settings import Settings
from tests.support.store import QUEUE, calls, new_job, row, work
from tests.support.waiting import PATIENCE_S

GONE = "20261121-073032-d974cc1efb"
BINDINGS = unused.bindings([QUEUE])
DAY_MS = 24 * 3600 * 1000


def sweep(broker: Broker, *, later_ms: int = 0) -> None:
    """The reaper's part of one round."""
    now_ms = broker.connection.now_ms() + later_ms
    broker.upkeep.queues.sweep(now_ms, in_use=broker.upkeep.agenda.drop_names())


def issue(broker: Broker, job_id: str) -> None:
    broker.send_issued(broker.jobs.status(job_id))


def forgotten(broker: Broker, raw: Redis, job_id: str) -> None:
    """Remove a job as its expiry does: nobody tidies up behind it."""
    raw.unlink(*(key for key in raw.scan_iter(match=f"embed:job:{job_id}*")))


def sent(broker: Broker, raw: Redis, job_id: str, *chunks: int) -> list[bytes]:
    """Send tickets; returns all messages in the queue, the newest first."""
    broker.tickets.send(QUEUE, job_id, list(chunks))
    return [message for message in raw.lrange(QUEUE, 0, -1) if isinstance(message, bytes)]


def message(body: str) -> bytes:
    return json.dumps({"body": body, "properties": {"body_encoding": "utf-8"}}).encode()


def test_a_discarded_job_leaves_no_queue(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3)
    issue(broker, job_id)
    assert raw.llen(QUEUE) == 3
    assert raw.exists(*BINDINGS) == 2
    raw.config_set("maxmemory", "1")  # it makes room in a full Redis
    try:
        Job(job_id, broker).discard()
    finally:
        raw.config_set("maxmemory", "0")
    assert not raw.exists(QUEUE, *BINDINGS)
    assert raw.zscore(keys.QUEUES, QUEUE)  # somebody may still send a ticket


@pytest.mark.parametrize("way", ["cancelled", "expired", "ended"])
def test_a_round_removes_the_queue_of_a_job_that_is_over(broker: Broker, raw: Redis, way: str) -> None:
    job_id = new_job(broker, 3)
    issue(broker, job_id)
    sweep(broker)
    assert raw.llen(QUEUE) == 3
    if way == "cancelled":
        broker.jobs.cancel(job_id)
    elif way == "expired":
        forgotten(broker, raw, job_id)
    else:
        work(broker, job_id, 0, 1, 2)
    sweep(broker)
    assert not raw.exists(QUEUE, *BINDINGS)


def test_the_tickets_of_a_job_that_waits_for_a_worker_stay(broker: Broker, raw: Redis) -> None:
    over, waits = new_job(broker, 2), new_job(broker, 2)
    issue(broker, over)
    issue(broker, waits)
    broker.jobs.cancel(over)
    needed = sent(broker, raw, over, 0)[1:3]
    sweep(broker, later_ms=30 * DAY_MS)
    assert raw.lrange(QUEUE, 0, -1) == needed
    assert raw.exists(*BINDINGS) == 2
    sweep(broker)
    assert raw.lrange(QUEUE, 0, -1) == needed


@pytest.mark.parametrize(
    "other",
    [
        b"x" * 20_000,
        message("[[1, 2], {}]"),
        message(f'[["{GONE}", 2], null]'),
        message(f'[["../{GONE}", 2], {{}}]'),
        message(f'[["{GONE}", 2], {{"version": Infinity}}]'),
    ],
)
def test_what_is_not_a_ticket_stays(broker: Broker, raw: Redis, other: bytes) -> None:
    new_job(broker, 0)
    raw.lpush(QUEUE, other)
    sent(broker, raw, GONE, 0)
    sweep(broker)
    assert raw.llen(QUEUE) == 2
    raw.lmove(QUEUE, QUEUE, "RIGHT", "LEFT")  # the ticket is now the oldest
    sweep(broker)
    assert raw.lrange(QUEUE, 0, -1) == [other]


def test_tickets_and_jobs_of_another_version_stay(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1)
    work(broker, job_id, 0)
    raw.hset(keys.job(job_id), "version", wire.VERSION + 1)
    kept = sent(broker, raw, job_id, 0)
    sweep(broker)
    assert raw.lrange(QUEUE, 0, -1) == kept
    raw.hset(keys.job(job_id), mapping={"version": 1, "state": "resting"})
    sweep(broker)
    assert raw.lrange(QUEUE, 0, -1) == kept
    forgotten(broker, raw, job_id)
    broker.tickets.forward([Ticket(QUEUE, GONE, 0, {"version": wire.VERSION + 1})])
    sweep(broker)
    assert raw.llen(QUEUE) == 1


def test_a_queue_with_a_live_worker_is_its_workers(broker: Broker, raw: Redis) -> None:
    Job(new_job(broker, 1), broker).discard()
    broker.workers.beat(row())
    sent(broker, raw, GONE, 0)
    sweep(broker)
    assert raw.llen(QUEUE) == 1
    broker.workers.leave(row())
    sweep(broker)
    assert not raw.exists(QUEUE)


def before_removal(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Let something happen between the look at a queue and the removal."""
    remove = UnusedQueues._remove

    def later(queues: UnusedQueues, *found: object) -> None:
        happens()
        remove(queues, *found)  # type: ignore[arg-type]  # it has what was found

    monkeypatch.setattr(UnusedQueues, "_remove", later)


def test_a_ticket_that_is_sent_meanwhile_stays(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes a ticket, and a new job sends its own."""
    job_id = new_job(broker, 2)
    sent(broker, raw, GONE, 0, 1)

    def meanwhile() -> None:
        raw.rpop(QUEUE)
        issue(broker, job_id)

    before_removal(monkeypatch, meanwhile)
    sweep(broker)
    assert raw.llen(QUEUE) == 2
    assert raw.exists(*BINDINGS) == 2


@pytest.mark.parametrize("which", ["old", "new"])
def test_no_ticket_is_lost_because_a_queue_was_removed(
    broker: Broker, raw: Redis, settings: Settings, which: str
) -> None:
    """Neither a worker that already consumes the queue, nor a sender that declared it before, misses its binding."""
    with make_celery(settings).connection_for_read() as connection, connection.SimpleQueue(QUEUE) as taken:
        job_id = new_job(broker, 1)
        issue(broker, job_id)
        Job(job_id, broker).discard()
        assert not raw.exists(QUEUE, *BINDINGS)
        sender = Broker.connect(settings) if which == "new" else broker
        next_id = new_job(broker, 2)
        issue(sender, next_id)
        message = taken.get(timeout=PATIENCE_S)
        raw.unlink(*BINDINGS)
        message.requeue()  # as a worker that ends does
        chunks = []
        for _ in range(2):
            message = taken.get(timeout=PATIENCE_S)
            chunks.append(message.payload[0])
            message.ack()
    assert sorted(chunks) == [[next_id, 0], [next_id, 1]]


def test_an_empty_queue_is_forgotten_when_nobody_can_send_to_it_any_more(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1)
    issue(broker, job_id)
    raw.delete(QUEUE)  # a worker took its ticket, and is gone
    kept_ms = keys.QUEUE_KEPT_S * 1000
    sweep(broker, later_ms=kept_ms + DAY_MS)
    assert raw.zscore(keys.QUEUES, QUEUE) is not None  # of a job, which just waits
    raw.zadd(keys.QUEUES, {QUEUE: broker.connection.now_ms()})
    forgotten(broker, raw, job_id)
    sweep(broker, later_ms=kept_ms - DAY_MS)
    assert raw.zscore(keys.QUEUES, QUEUE) is not None
    assert raw.exists(*BINDINGS) == 2
    sweep(broker, later_ms=kept_ms + DAY_MS)
    assert raw.zscore(keys.QUEUES, QUEUE) is None
    assert not raw.exists(*BINDINGS)


def test_rounds_are_bounded_and_get_to_every_ticket_of_every_queue(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unused, "_QUEUES", 3)
    monkeypatch.setattr(unused, "_TICKETS", 4)
    queues = [f"{QUEUE}-{at}" for at in range(7)]
    for queue in queues:
        broker.tickets.send(queue, GONE, range(5))
    broker.upkeep.queues.mark(queues, 1)
    left = []
    for _ in range(60):
        broker.upkeep.queues.sweep(2, in_use=[])
        left.append(sum(raw.llen(queue) for queue in queues))
    assert max(before - after for before, after in zip([35, *left], left, strict=False)) <= 4
    assert left[-1] == 0
    assert not raw.keys("_kombu.binding*")


def test_a_key_of_another_program_stops_nothing(broker: Broker, raw: Redis) -> None:
    new_job(broker, 0)
    broker.upkeep.queues.mark(["embed.dummy.other"], 1)
    raw.set("embed.dummy.other", "theirs")
    broken = new_job(broker, 0)
    raw.delete(keys.job(broken))
    raw.set(keys.job(broken), "theirs")
    sent(broker, raw, broken, 0)
    oldest = sent(broker, raw, GONE, 0)[1:]
    sweep(broker)
    assert raw.get("embed.dummy.other") == b"theirs"
    assert raw.lrange(QUEUE, 1, 1) == oldest
    assert raw.zscore(keys.JOBS, broken) is not None


def test_a_round_without_unused_queues_reads_two_facts_of_each(broker: Broker, raw: Redis) -> None:
    """Most rounds find nothing: they read the oldest ticket and the number of workers, in one round trip."""
    new_job(broker, 0)
    upkeep = Upkeep(broker.connection, Settings())
    raw.config_resetstat()
    upkeep.queues.sweep(broker.connection.now_ms(), in_use=[])
    assert calls(raw, "lindex") == 1
