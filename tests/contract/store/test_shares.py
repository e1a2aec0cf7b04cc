"""Tenants, lanes and jobs that wait for the same workers take turns. Counted in chunks of equal size, not timed."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Issued
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.shares import LARGE, Workers, add_chunk, job_of
from tests.support.store import QUEUE, claim, overdue, pass_ms, reaped, row, score, spec


@pytest.mark.parametrize(
    ("one", "others", "count", "share"),
    [
        pytest.param({"chunks": 90}, {"chunks": 6}, 15, 0.5, id="many jobs of a tenant"),
        pytest.param({"chunks": 220, "size": 100}, {"chunks": 6, "size": 100}, 20, 0.5, id="many jobs of small chunks"),
        pytest.param({"chunks": 120, "weight": 3.0}, {"chunks": 10}, 5, 0.75, id="weights"),
        pytest.param({"chunks": 50, "size": 3 * LARGE}, {"chunks": 120}, 1, 0.25, id="bytes"),
        pytest.param({"chunks": 90}, {"chunks": 30, "lane": "interactive"}, 4, 0.5, id="interactive jobs"),
    ],
)
def test_who_has_which_share(
    broker: Broker, one: dict[str, Any], others: dict[str, Any], count: int, share: float
) -> None:
    workers = Workers(broker)
    jobs = [job_of(broker, "x", **one), *(job_of(broker, "y", **others) for _ in range(count))]
    for job_id in jobs:
        workers.issue(job_id)
    workers.run(len(workers.tickets))  # the first tickets are all of the job that came first
    workers.done.clear()
    workers.run(80)
    assert workers.share(jobs[:1]) == pytest.approx(share, abs=0.05)
    assert workers.idle == 0


def test_who_leaves_and_comes_back_for_each_chunk_has_no_more_than_its_share(broker: Broker) -> None:
    workers = Workers(broker)
    workers.issue(job_of(broker, "idle", chunks=3, weight=100.0))
    workers.issue(job_of(broker, "x", chunks=110, weight=3.0))
    again, added = broker.jobs.create(spec(tenant="y"))[0], 0
    done = 0
    for _ in range(100):
        if added == done:  # its producer adds a chunk when the last one is done
            add_chunk(broker, again, added)
            added += 1
            workers.issue(again)
        workers.step()
        done = workers.done[again]
    assert workers.share([again]) <= 0.27


def test_a_small_job_of_a_tenant_is_not_stuck_behind_its_large_one(broker: Broker, raw: Redis) -> None:
    workers = Workers(broker)
    large = job_of(broker, chunks=60)
    raw.hset(keys.job(large), "created_ms", broker.connection.now_ms() - 86_400_000)  # however old that is
    workers.issue(large)
    workers.run(5)
    small = job_of(broker, chunks=2)
    workers.issue(small)
    workers.run(20)
    assert workers.done[small] == 2


def test_a_large_job_has_a_turn_a_minute_among_small_ones(broker: Broker, raw: Redis) -> None:
    large, small = job_of(broker, chunks=100), job_of(broker, chunks=2)
    jobs = keys.flow("normal", "default", QUEUE)
    raw.zadd(keys.lanes(QUEUE), {"normal": 0})
    raw.zadd(keys.flows("normal", QUEUE), {"default": 0})
    raw.zadd(jobs, {large: broker.connection.now_ms() / 1000 - 60 + 60})  # it had its last turn a minute ago
    assert broker.jobs.issue(small, QUEUE)[0].job_id == large
    order = score(raw, jobs, large)
    assert order == pytest.approx(broker.connection.now_ms() / 1000 + 60, abs=30)
    broker.jobs.issue(large, QUEUE)  # another call for it changes nothing
    assert score(raw, jobs, large) == pytest.approx(order)


def test_an_interactive_job_is_done_within_a_window(broker: Broker, settings: Settings) -> None:
    workers = Workers(broker)
    workers.issue(job_of(broker, "x", chunks=200))
    workers.run(30)
    assert len(workers.tickets) + len(workers.hands) == settings.limits.window_per_worker * workers.count
    for _ in range(5):
        urgent = job_of(broker, "y", "interactive", chunks=1)
        workers.issue(urgent)
        workers.run(3 + settings.limits.window_per_worker * workers.count)
        assert workers.done[urgent] == 1


def test_the_background_waits_until_nothing_else_does_but_not_for_ever(broker: Broker, raw: Redis) -> None:
    workers = Workers(broker)
    slow, normal = job_of(broker, "x", "background", chunks=60), job_of(broker, "y", chunks=100)
    for job_id in (normal, slow):
        workers.issue(job_id)
    workers.run(50)
    assert workers.done[slow] == 1
    assert 0 < raw.pttl(keys.background_pause(QUEUE)) <= 60_000
    raw.delete(keys.background_pause(QUEUE))  # a minute later
    workers.run(30)
    assert workers.done[slow] == 2
    workers.run(80)
    assert workers.done[normal] == 100
    assert workers.done[slow] == 60
    workers.run(10)
    assert not raw.exists(keys.lanes(QUEUE), keys.flows("background", QUEUE))


def issued_in_ten_calls(broker: Broker, job_id: str = "") -> list[Issued]:
    """Each call checks a few of the chunks that are on their way, those of one millisecond in any order."""
    pass_ms(broker)
    return [each for _ in range(10) for each in broker.jobs.issue(job_id, QUEUE)]


def test_tickets_that_were_never_sent_hold_up_the_others_for_seconds_only(
    broker: Broker, raw: Redis, settings: Settings
) -> None:
    """Their process died, and they are due only after `reissue_s`."""
    lost, waits = job_of(broker, chunks=20), job_of(broker, chunks=20)
    broker.jobs.issue(lost, QUEUE)
    assert broker.jobs.issue(waits, QUEUE) == []
    for chunk in range(settings.limits.window):
        raw.zincrby(keys.due(lost), -6000, chunk)
    raw.lpush(QUEUE, "as long as there are tickets, theirs may be among them")
    assert broker.jobs.issue(waits, QUEUE) == []
    raw.delete(QUEUE)
    assert [each.job_id for each in issued_in_ten_calls(broker, waits)] == [waits] * settings.limits.window


@pytest.mark.parametrize("end", ["cancel", "stop", "gone"])
def test_a_job_that_is_over_gives_its_room_back(broker: Broker, raw: Redis, settings: Settings, end: str) -> None:
    over, waits = job_of(broker, chunks=20), job_of(broker, chunks=20)
    broker.jobs.issue(over, QUEUE)
    assert broker.jobs.issue(waits, QUEUE) == []
    if end == "gone":
        raw.delete(*raw.keys(f"embed:job:{over}*"))
    else:
        getattr(broker.jobs, end)(over)
    assert [each.job_id for each in issued_in_ten_calls(broker)] == [waits] * settings.limits.window


@pytest.mark.parametrize("how", ["refused", "given back", "not taken"])
def test_chunks_that_nobody_can_encode_do_not_hold_up_other_jobs(
    broker: Broker, raw: Redis, settings: Settings, how: str
) -> None:
    bad, good = job_of(broker, "x", chunks=20), job_of(broker, "y", chunks=20)
    broker.workers.beat(row())
    window = range(settings.limits.window)
    broker.jobs.issue(bad, QUEUE)
    for chunk in window:
        if how == "refused":
            raw.hset(keys.job(bad), "model_fingerprint", "other")
            assert claim(broker, bad, chunk).answer == "mismatch"
        elif how == "given back":
            claim(broker, bad, chunk)
            assert broker.jobs.release(bad, chunk, "t", delay_s=600, trouble="it failed")
        else:
            overdue(raw, bad, chunk)
    reaped(broker, bad)
    assert issued_in_ten_calls(broker) == []  # the good job is not known yet
    assert [each.job_id for each in issued_in_ten_calls(broker, good)] == [good] * settings.limits.window
    assert broker.jobs.issue(bad, QUEUE) == []


def test_a_damaged_job_does_not_hold_up_others(broker: Broker, raw: Redis) -> None:
    damaged, fine = job_of(broker, chunks=1), job_of(broker, chunks=2)
    for each in (damaged, fine):  # both are noted, and the damaged one comes first
        raw.zadd(keys.lanes(QUEUE), {"normal": 0})
        raw.zadd(keys.flows("normal", QUEUE), {"default": 0})
        raw.zadd(keys.flow("normal", "default", QUEUE), {each: 1 if each == damaged else 2})
    raw.delete(keys.due(damaged), keys.chunk_input(damaged, 0))
    raw.lpush(keys.chunk_input(damaged, 0), "x")
    assert {each.job_id for each in broker.jobs.issue("", QUEUE)} == {fine}


def test_a_job_of_another_version_gets_no_turn(broker: Broker, raw: Redis) -> None:
    other, mine = job_of(broker, chunks=1), job_of(broker, chunks=2)
    broker.jobs.issue(other, QUEUE)
    raw.hset(keys.job(other), mapping={"version": 99, "next": 0})
    raw.zadd(keys.flow("normal", "default", QUEUE), {other: 0})
    assert broker.jobs.issue(mine, QUEUE) == [Issued(mine, 0), Issued(mine, 1)]
