"""next, renew, complete, release: every answer that a worker can get. reap, audit, free: what was lost comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Claimant, Given, JobState, scripts, upkeep
from embedctl_config import keys, wire
from embedctl_config.settings import Settings
from tests.support.store import (
    MINE,
    OPTIONS,
    OTHER,
    QUEUE,
    add,
    assert_from_now,
    audited,
    claim,
    complete,
    keys_of,
    lapse,
    leases,
    new_job,
    payload,
    reaped,
    row,
    score,
    some,
    take,
    take_all,
    work,
)


def test_chunks_are_given_in_the_order_in_that_they_were_added(broker: Broker) -> None:
    job_id = new_job(broker, 2, seal=False)
    assert take_all(broker) == [0, 1]
    add(broker, job_id, 2)
    assert take_all(broker) == [2]


def test_a_claim_brings_the_text_and_counts(broker: Broker, raw: Redis, settings: Settings) -> None:
    job_id = new_job(broker, 2)
    began = broker.connection.now_ms()
    found = some(claim(broker, job_id, 0))
    assert (found.attempt, found.input) == (1, payload(0))
    status = broker.jobs.status(job_id)
    assert (status.state, status.claims) == (JobState.RUNNING, 1)
    assert (status.model_fingerprint, status.pinned_by) == (MINE, "w")
    assert status.started_at is not None
    assert_from_now(broker, leases(raw, job_id)[0], after_s=settings.lease_s, since_ms=began)


def test_the_chunk_of_a_live_lease_is_nobody_elses(broker: Broker) -> None:
    job_id = new_job(broker)
    for token in ("first", "firs"):
        assert take(broker, token) is not None
    assert take(broker, "third") is None
    assert broker.jobs.renew(job_id, 0, "first") == broker.jobs.renew(job_id, 1, "firs") == "ok"


def test_a_lost_answer_is_given_again(broker: Broker, raw: Redis) -> None:
    """As redis-py asks after a lost connection, for as long as the chunk is the claim's."""
    job_id = new_job(broker, 3)
    first, *others = (take(broker, token) for token in ("t", "t", "other"))
    assert first is not None
    assert replace(first, waited_s=0.0, job=None) == others[0]
    assert others[1] is not None
    assert others[1].chunk == 1
    assert (broker.jobs.status(job_id).claims, raw.hlen(keys.owners(job_id))) == (2, 2)
    assert 0 < raw.pttl(keys.given("t")) <= 20_000
    assert complete(broker, job_id, 0) == "ok"
    assert take(broker) is None


def test_the_facts_of_a_small_job_come_with_its_chunk(broker: Broker) -> None:
    small, large = new_job(broker, 16), new_job(broker, 17)
    found = some(claim(broker, small, 0))
    assert found.job is not None
    assert (found.job.id, found.job.state, found.job.options) == (small, JobState.RUNNING, OPTIONS)
    found = some(claim(broker, large, 0))
    assert found.job is None


@pytest.mark.parametrize("end", ["gone", "cancelled", "version"])
def test_a_job_that_wants_nothing_answers_so(broker: Broker, raw: Redis, end: str) -> None:
    job_id = new_job(broker)
    if end == "gone":
        raw.delete(keys.job(job_id))
    elif end == "cancelled":
        broker.jobs.cancel(job_id)
    else:
        raw.hset(keys.job(job_id), "version", wire.VERSION + 1)
    before = {key: raw.dump(key) for key in keys_of(raw, job_id)}
    given = broker.jobs.next(QUEUE, "t", Claimant("w", MINE, "fp32"))
    assert given.claims == []
    assert given.unusable == ([(job_id, f"of version {wire.VERSION + 1}")] if end == "version" else [])
    assert broker.jobs.renew(job_id, 0, "t") == end
    assert not broker.jobs.release(job_id, 0, "t", delay_s=0)
    assert complete(broker, job_id, 0) == end
    assert {key: raw.dump(key) for key in keys_of(raw, job_id)} == before


def test_renewing_brings_back_a_lease_that_nobody_took(broker: Broker, raw: Redis, settings: Settings) -> None:
    job_id = new_job(broker)
    claim(broker, job_id, 0)
    began = broker.connection.now_ms()
    lapse(raw, job_id, 0)
    assert broker.jobs.renew(job_id, 0, "t") == "ok"
    assert_from_now(broker, leases(raw, job_id)[0], after_s=settings.lease_s, since_ms=began)
    assert reaped(broker, job_id) == []


@pytest.mark.parametrize(
    "owner", ["", "damaged", "t w", "t w x 1 1", "t w 1 x 1", "t w 1 1 x", "t a host with blanks 1"]
)
def test_the_words_of_an_owner_that_are_damaged_cost_a_try(broker: Broker, raw: Redis, owner: str) -> None:
    broker.workers.beat(row())
    job_id = new_job(broker)
    for chunk in range(2):
        claim(broker, job_id, chunk, f"t{chunk}")
        raw.hset(keys.owners(job_id), chunk, owner)
    assert complete(broker, job_id, 0, "t0") == "ok"
    if reaped(broker, job_id) == [1]:
        assert claim(broker, job_id, 1, "again") is not None
        assert broker.jobs.renew(job_id, 1, "again") == "ok"
    assert complete(broker, job_id, 1, "t1") == "ok"
    assert broker.jobs.status(job_id).state == JobState.COMPLETED


def test_a_result_of_other_weights_is_refused_and_leaves_the_lease(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    claim(broker, job_id, 0, "owner")
    assert complete(broker, job_id, 0, "stranger", fingerprint=OTHER) == "mismatch"
    assert broker.jobs.result(job_id, 0) is None
    assert not raw.exists(keys.uncommitted_result(job_id, 0, "stranger"))
    assert broker.jobs.status(job_id).refused == 1
    assert broker.jobs.renew(job_id, 0, "owner") == "ok"
    assert complete(broker, job_id, 0, "owner") == "ok"


def test_the_first_result_of_a_job_pins_it_even_without_a_claim(broker: Broker) -> None:
    job_id = new_job(broker)
    assert complete(broker, job_id, 0) == "ok"
    assert broker.jobs.status(job_id).model_fingerprint == MINE
    assert take(broker, fingerprint=OTHER) is None
    assert take(broker) is not None


def test_a_chunk_that_is_given_back_is_the_next_ones_after_the_delay(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1)
    claim(broker, job_id, 0, "first")
    began = broker.connection.now_ms()
    assert broker.jobs.release(job_id, 0, "first", delay_s=5)
    assert_from_now(broker, score(raw, keys.ready(job_id), 0), after_s=5, since_ms=began)
    assert broker.jobs.renew(job_id, 0, "first") == "not_owner"
    assert take(broker, "early") is None
    raw.zadd(keys.ready(job_id), {"0": 0})  # its time has come
    assert score(raw, keys.UPKEEP, job_id) <= broker.connection.now_ms() + 5000
    assert reaped(broker, job_id) == []
    found = some(take(broker, "second"))
    assert found.attempt == 2
    assert broker.jobs.status(job_id).lapsed == 0


def test_a_chunk_is_left_to_other_workers_for_a_time_if_there_are_any(broker: Broker) -> None:
    job_id = new_job(broker, 1)
    broker.workers.beat(row("w"))
    claim(broker, job_id, 0)
    broker.jobs.release(job_id, 0, "t", delay_s=0, others_first_s=600)
    assert claim(broker, job_id, 0, "alone") is not None
    broker.workers.beat(row("x"))
    broker.jobs.release(job_id, 0, "alone", delay_s=0, others_first_s=600)
    assert broker.jobs.next(QUEUE, "again", Claimant("w", MINE, "fp32")) == Given([], later=True, unusable=[])
    assert take(broker, "other", instance="x") is not None
    broker.jobs.release(job_id, 0, "other", delay_s=0)
    assert take(broker, "free") is not None


def test_only_the_owner_renews_and_releases(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)

    def refused(token: str) -> bool:
        renewed, released = broker.jobs.renew(job_id, 0, token), broker.jobs.release(job_id, 0, token, delay_s=0)
        return (renewed, released) == ("not_owner", False)

    assert refused("t")
    assert not raw.exists(keys.owners(job_id), keys.ready(job_id))
    claim(broker, job_id, 0, "mine")
    assert refused("yours")
    complete(broker, job_id, 0, "mine")
    assert refused("mine")


def test_what_happens_to_a_job_wakes_those_who_wait_for_it(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    work(broker, job_id, 0, 1)
    found: Any = raw.xrange(keys.events(job_id))
    events = [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in found]
    assert events == [{"state": "queued"}, {"state": "running"}, {"chunk": "0"}, {"chunk": "1"}, {"state": "completed"}]


def test_a_process_without_file_descriptors_gives_back(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = new_job(broker, 1)
    claim(broker, job_id, 0)
    scripts.file_text.cache_clear()
    scripts.read_all()
    monkeypatch.setattr(scripts, "_FOLDER", Mock(joinpath=Mock(side_effect=OSError(24, "Too many open files"))))
    scripts.script_source.cache_clear()
    assert broker.jobs.release(job_id, 0, "t", delay_s=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_lapsed_chunks_are_offered_to_live_workers(broker: Broker, raw: Redis, workers: int) -> None:
    job_id = new_job(broker, 3)
    broker.workers.leave(row("w"))  # the owner, which is not taken for dead
    for chunk in range(3):
        claim(broker, job_id, chunk, f"t{chunk}")
    for number in range(workers):
        broker.workers.beat(row(f"w{number}"))
    assert reaped(broker, job_id) == []
    lapse(raw, job_id, 0, 2)
    assert reaped(broker, job_id) == [0, 2]
    assert raw.llen(QUEUE) == 2 * workers
    again = [take(broker, f"again{number}") for number in range(3)]
    assert [None if each is None else (each.chunk, each.attempt) for each in again] == [(0, 2), (2, 2), None]


def test_an_audit_marks_the_range_of_what_is_lost(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 8)
    work(broker, job_id, 3)
    raw.delete(keys.chunk_input(job_id, 2), keys.chunk_input(job_id, 5))
    assert take_all(broker) == [0, 1, 4, 6, 7]
    raw.delete(keys.chunk_result(job_id, 3))
    assert audited(broker, job_id) == 3
    assert broker.jobs.status(job_id).lost_chunks == (2, 5)
    assert audited(broker, job_id) == 3
    assert broker.jobs.status(job_id).lost_chunks == (2, 5)


def test_freeing_takes_a_slice_at_a_time(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 3)
    job_id = new_job(broker, 7)
    work(broker, job_id, 0, 4, failed=1)
    before = keys_of(raw, job_id)
    broker.upkeep.free(job_id, 7, if_ended_early=True)  # the cancellation is lost, by a Redis without its last second
    assert broker.upkeep.free_slice(job_id, 3, results=True)
    assert keys_of(raw, job_id) == before
    broker.jobs.cancel(job_id)
    assert not broker.upkeep.free_slice(job_id, 7, results=True)
    raw.delete(keys.cursors(job_id))  # Redis came back at an earlier slice
    broker.upkeep._let_go(job_id, [job_id, "freed_to", 3, ""], [keys.chunk_result(job_id, 0)])
    assert raw.zscore(keys.ACTIVE, job_id) is not None
    assert [broker.upkeep.free_slice(job_id, 7, results=True) for _ in range(3)] == [False, False, True]
    assert raw.zscore(keys.ACTIVE, job_id) is None
    assert not any(":in:" in key or ":out:" in key for key in keys_of(raw, job_id))
    assert broker.jobs.status(job_id).state == "cancelled"
