"""reap, audit and free: what was lost on the way comes back, and nothing healthy is touched."""

from __future__ import annotations

from itertools import chain

import pytest
import redis as redis_py

from embedctl.broker import Broker
from embedctl.store import upkeep
from embedctl_config import keys, wire
from embedctl_config.settings import Settings
from tests.support.jobs import last_event
from tests.support.store import (
    OTHER,
    QUEUE,
    add,
    assert_consistent,
    assert_due,
    claim,
    complete,
    keys_of,
    new_job,
    overdue,
    row,
    work,
)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The time for reissuing is doubled several times before it reaches its bound."""
    return settings.replace(lease_s=30.0, reissue_s=60.0)


@pytest.fixture
def live(broker: Broker) -> Broker:
    """The broker, with a live worker on the queue."""
    broker.workers.beat(row())
    return broker


def test_nothing_is_reaped_before_its_time(live: Broker) -> None:
    job_id = new_job(live, 3)
    live.jobs.issue(job_id, QUEUE)
    claim(live, job_id, 0)
    assert live.upkeep.reap(job_id, QUEUE) == []
    assert live.jobs.status(job_id).lapsed == 0


def test_a_lapsed_lease_gets_a_ticket_and_loses_its_owner(
    live: Broker, raw: redis_py.Redis, settings: Settings
) -> None:
    job_id = new_job(live, 3)
    live.jobs.issue(job_id, QUEUE)
    claim(live, job_id, 1, "dead")
    overdue(raw, job_id, 1)
    began = live.connection.now_ms()
    assert live.upkeep.reap(job_id, QUEUE) == [1]
    assert live.jobs.status(job_id).lapsed == 1
    assert live.jobs.renew(job_id, 1, "dead") == "not_owner"
    assert_due(live, raw, job_id, 1, after_s=settings.reissue_s, since_ms=began)
    assert live.upkeep.reap(job_id, QUEUE) == []
    assert claim(live, job_id, 1, "next").attempt == 2
    assert_consistent(live, raw, job_id)


def test_a_ticket_that_nobody_takes_is_sent_again_ever_later(live: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(live, 1)
    live.jobs.issue(job_id, QUEUE)
    for wait_s in (120, 240, 480, 960, 1800, 1800, 1800):
        overdue(raw, job_id, 0)
        began = live.connection.now_ms()
        assert live.upkeep.reap(job_id, QUEUE) == [0]
        assert_due(live, raw, job_id, 0, after_s=wait_s, since_ms=began)
    assert upkeep.LONGEST_REISSUE_MS == 1800 * 1000
    assert live.jobs.status(job_id).lapsed == 0
    assert_consistent(live, raw, job_id)


def test_a_claim_makes_the_waits_short_again(live: Broker, raw: redis_py.Redis, settings: Settings) -> None:
    job_id = new_job(live, 1)
    live.jobs.issue(job_id, QUEUE)
    for _ in range(3):
        overdue(raw, job_id, 0)
        live.upkeep.reap(job_id, QUEUE)
    claim(live, job_id, 0)
    live.jobs.release(job_id, 0, "t", delay_s=0)
    overdue(raw, job_id, 0)
    began = live.connection.now_ms()
    live.upkeep.reap(job_id, QUEUE)
    assert_due(live, raw, job_id, 0, after_s=2 * settings.reissue_s, since_ms=began)


def test_nothing_is_reaped_while_the_queue_has_no_live_worker(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(broker, 1)
    broker.jobs.issue(job_id, QUEUE)
    overdue(raw, job_id, 0)
    raw.zadd(keys.queue_workers(QUEUE), {"dead": broker.connection.now_ms() - 1})
    broker.workers.beat(row("elsewhere", "another-model"))
    assert broker.upkeep.reap(job_id, QUEUE) == []
    assert not raw.hexists(keys.reissues(job_id), 0)
    broker.workers.beat(row())
    assert broker.upkeep.reap(job_id, QUEUE) == [0]


def test_a_ticket_refused_for_its_weights_comes_back_to_the_queue(live: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(live, 2)
    claim(live, job_id, 0)
    claim(live, job_id, 1, "t1", fingerprint=OTHER)
    overdue(raw, job_id, 1)
    assert live.upkeep.reap(job_id, QUEUE) == [1]


def test_reaping_takes_a_slice_at_a_time(live: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 3)
    job_id = new_job(live, 8)
    live.jobs.issue(job_id, QUEUE)
    overdue(raw, job_id, *range(8))
    assert sorted(chain.from_iterable(live.upkeep.reap(job_id, QUEUE) for _ in range(3))) == list(range(8))
    assert live.upkeep.reap(job_id, QUEUE) == []


@pytest.mark.parametrize("end", ["completed", "cancelled", "gone", "version"])
def test_nothing_is_reaped_or_audited_of_a_job_that_wants_nothing(live: Broker, raw: redis_py.Redis, end: str) -> None:
    job_id = new_job(live, 2)
    live.jobs.issue(job_id, QUEUE)
    if end == "completed":
        work(live, job_id, 0, 1)
        raw.zadd(keys.due(job_id), {"0": 1})
    elif end == "cancelled":
        live.jobs.cancel(job_id)
    elif end == "gone":
        raw.delete(keys.job(job_id))
    else:
        raw.hset(keys.job(job_id), "version", wire.VERSION + 1)
        overdue(raw, job_id, 0, 1)
    assert live.upkeep.reap(job_id, QUEUE) == []
    assert live.upkeep.audit(job_id) == 0


def test_an_audit_that_comes_after_the_budget_has_ended_a_job_leaves_it_as_it_is(
    live: Broker, raw: redis_py.Redis
) -> None:
    job_id = new_job(live, 3, max_errors=0)
    live.jobs.issue(job_id, QUEUE)
    work(live, job_id, 0, failed=1)
    assert live.upkeep.audit(job_id) == 0
    assert not raw.exists(keys.due(job_id))
    assert live.upkeep.free_slice(job_id, 3, results=False)
    assert live.upkeep.audit(job_id) == 0
    assert live.jobs.status(job_id).lost_chunks is None


def test_an_audit_of_a_healthy_job_finds_nothing(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(broker, 5)
    broker.jobs.issue(job_id, QUEUE)
    work(broker, job_id, 0)
    claim(broker, job_id, 1)
    before = raw.zrange(keys.due(job_id), 0, -1, withscores=True)
    assert broker.upkeep.audit(job_id) == 0
    assert broker.jobs.status(job_id).lost_chunks is None
    assert raw.zrange(keys.due(job_id), 0, -1, withscores=True) == before


def test_an_audit_looks_at_issued_chunks_only(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(broker, 5)
    raw.delete(keys.chunk_input(job_id, 2))
    assert broker.upkeep.audit(job_id) == 0


def test_an_audit_issues_a_chunk_again_that_nothing_remembers(live: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(live, 4)
    live.jobs.issue(job_id, QUEUE)
    work(live, job_id, 0)
    raw.zrem(keys.due(job_id), 2)
    assert live.upkeep.audit(job_id) == 0
    assert live.upkeep.reap(job_id, QUEUE) == [2]
    work(live, job_id, 1, 2, 3)
    assert live.jobs.status(job_id).state == "completed"
    assert_consistent(live, raw, job_id)


def test_an_audit_marks_the_range_of_what_is_lost(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(broker, 8)
    broker.jobs.issue(job_id, QUEUE)
    work(broker, job_id, 3)
    for chunk in (2, 5):
        raw.delete(keys.chunk_input(job_id, chunk))
        assert claim(broker, job_id, chunk, f"t{chunk}").answer == "lost"
    raw.delete(keys.chunk_result(job_id, 3))
    assert broker.upkeep.audit(job_id) == 3
    assert broker.jobs.status(job_id).lost_chunks == (2, 5)
    assert broker.upkeep.audit(job_id) == 3
    assert broker.jobs.status(job_id).lost_chunks == (2, 5)


def test_an_audit_goes_through_a_long_job_by_slices(
    broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 3)
    job_id = new_job(broker, 8)
    broker.jobs.issue(job_id, QUEUE)
    for chunk in (1, 7):
        raw.delete(keys.chunk_input(job_id, chunk))
        raw.zrem(keys.due(job_id), chunk)
    assert [broker.upkeep.audit(job_id) for _ in range(4)] == [1, 0, 1, 1]
    assert broker.jobs.status(job_id).lost_chunks == (1, 7)


def test_a_loss_is_an_event(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(broker, 1)
    broker.jobs.issue(job_id, QUEUE)
    seen = last_event(broker, job_id, "0", timeout_s=1)
    raw.delete(keys.chunk_input(job_id, 0))
    claim(broker, job_id, 0)
    broker.upkeep.audit(job_id)
    assert last_event(broker, job_id, seen, timeout_s=1) != seen


def test_freeing_takes_a_slice_at_a_time(broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 3)
    job_id = new_job(broker, 7)
    work(broker, job_id, 0, 4, failed=1)
    broker.jobs.cancel(job_id)
    assert [broker.upkeep.free_slice(job_id, 7) for _ in range(3)] == [False, False, True]
    assert not any(":in:" in key or ":out:" in key for key in keys_of(raw, job_id))
    assert broker.jobs.status(job_id).state == "cancelled"


def test_active_jobs_are_those_that_have_not_ended(broker: Broker) -> None:
    jobs = [new_job(broker, ttl_s=keys.UNENDED_TTL_S) for _ in range(3)]
    work(broker, jobs[1], 0, 1)
    assert set(broker.upkeep.active_jobs()) == {jobs[0], jobs[2]}  # those of one millisecond are in no order
    broker.upkeep.forget(jobs[0])
    assert list(broker.upkeep.active_jobs()) == [jobs[2]]


def test_active_jobs_are_read_by_slices(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 2)
    jobs = {new_job(broker, 0, seal=False) for _ in range(5)}
    assert set(broker.upkeep.active_jobs()) == jobs


def test_a_job_whose_last_chunk_was_reaped_still_ends_once(live: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(live, 1, seal=False)
    live.jobs.issue(job_id, QUEUE)
    claim(live, job_id, 0, "slow")
    overdue(raw, job_id, 0)
    live.upkeep.reap(job_id, QUEUE)
    claim(live, job_id, 0, "quick")
    assert complete(live, job_id, 0, "slow") == "ok"
    add(live, job_id, 1)
    live.jobs.seal(job_id, 2)
    assert complete(live, job_id, 0, "quick") == "refused"
    work(live, job_id, 1)
    status = live.jobs.status(job_id)
    assert (status.state, status.done, status.refused, status.lapsed) == ("completed", 4, 1, 1)
    assert_consistent(live, raw, job_id)
