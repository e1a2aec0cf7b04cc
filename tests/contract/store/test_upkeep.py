"""reap, audit and free: what was lost on the way comes back, and nothing healthy is touched."""

from __future__ import annotations

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import upkeep
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.limits import limited
from tests.support.store import (
    QUEUE,
    assert_consistent,
    assert_due,
    audited,
    claim,
    keys_of,
    new_job,
    overdue,
    reaped,
    row,
    work,
)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The time for reissuing is doubled several times before it reaches its bound."""
    return limited(settings.replace(lease_s=30.0), reissue_s=60.0)


@pytest.fixture
def live(broker: Broker) -> Broker:
    """The broker, with a live worker on the queue."""
    broker.workers.beat(row())
    return broker


def test_a_ticket_that_nobody_takes_is_sent_again_ever_later(live: Broker, raw: Redis) -> None:
    job_id = new_job(live, 1)
    live.jobs.issue(job_id, QUEUE)
    for wait_s in (120, 240, 480, 960, 1800, 1800, 1800):
        overdue(raw, job_id, 0)
        began = live.connection.now_ms()
        assert reaped(live, job_id) == [0]
        assert_due(live, raw, job_id, 0, after_s=wait_s, since_ms=began)
    assert upkeep.LONGEST_REISSUE_MS == 1800 * 1000
    assert live.jobs.status(job_id).lapsed == 0
    assert_consistent(live, raw, job_id)


def test_a_claim_makes_the_waits_short_again(live: Broker, raw: Redis, settings: Settings) -> None:
    job_id = new_job(live, 1)
    live.jobs.issue(job_id, QUEUE)
    for _ in range(3):
        overdue(raw, job_id, 0)
        reaped(live, job_id)
    claim(live, job_id, 0)
    live.jobs.release(job_id, 0, "t", delay_s=0)
    overdue(raw, job_id, 0)
    began = live.connection.now_ms()
    reaped(live, job_id)
    assert_due(live, raw, job_id, 0, after_s=2 * settings.limits.reissue_s, since_ms=began)


def test_nothing_is_reaped_while_the_queue_has_no_live_worker(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1)
    broker.jobs.issue(job_id, QUEUE)
    overdue(raw, job_id, 0)
    raw.zadd(keys.queue_workers(QUEUE), {"dead": broker.connection.now_ms() - 1})
    broker.workers.beat(row("elsewhere", "another-model"))
    assert reaped(broker, job_id) == []
    assert not raw.hexists(keys.reissues(job_id), 0)
    broker.workers.beat(row())
    assert reaped(broker, job_id) == [0]


def test_an_audit_marks_the_range_of_what_is_lost(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 8)
    broker.jobs.issue(job_id, QUEUE)
    work(broker, job_id, 3)
    for chunk in (2, 5):
        raw.delete(keys.chunk_input(job_id, chunk))
        assert claim(broker, job_id, chunk, f"t{chunk}").answer == "lost"
    raw.delete(keys.chunk_result(job_id, 3))
    assert audited(broker, job_id) == 3
    assert broker.jobs.status(job_id).lost_chunks == (2, 5)
    assert audited(broker, job_id) == 3
    assert broker.jobs.status(job_id).lost_chunks == (2, 5)


def test_an_audit_goes_through_a_long_job_by_slices(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 3)
    job_id = new_job(broker, 8)
    broker.jobs.issue(job_id, QUEUE)
    for chunk in (1, 7):
        raw.delete(keys.chunk_input(job_id, chunk))
        raw.zrem(keys.due(job_id), chunk)
    assert [audited(broker, job_id) for _ in range(4)] == [1, 0, 1, 1]
    assert broker.jobs.status(job_id).lost_chunks == (1, 7)


def test_freeing_takes_a_slice_at_a_time(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 3)
    job_id = new_job(broker, 7)
    work(broker, job_id, 0, 4, failed=1)
    broker.jobs.cancel(job_id)
    assert [broker.upkeep.free_slice(job_id, 7) for _ in range(3)] == [False, False, True]
    assert not any(":in:" in key or ":out:" in key for key in keys_of(raw, job_id))
    assert broker.jobs.status(job_id).state == "cancelled"
