"""issue, claim, renew, complete and release: every answer that a worker can get."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Claim, ClaimAnswer, Claimant, JobState, JobStatus, scripts
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerRefused, JobNotFound
from embedctl_config.settings import Settings
from tests.support.store import (
    MINE,
    OPTIONS,
    OTHER,
    QUEUE,
    add,
    assert_consistent,
    assert_due,
    claim,
    complete,
    due_in_s,
    issued,
    keys_of,
    new_job,
    overdue,
    payload,
    row,
    score,
    work,
)


def test_issue_chooses_chunks_that_were_added_and_fit_into_the_window(broker: Broker, settings: Settings) -> None:
    job_id = new_job(broker, 20)
    assert issued(broker, job_id) == list(range(settings.limits.window))
    assert issued(broker, job_id) == []
    work(broker, job_id, 0, 1)
    assert issued(broker, job_id) == [8, 9]
    short = new_job(broker, 2, seal=False)
    assert issued(broker, short) == [0, 1]
    add(broker, short, 2)
    assert issued(broker, short) == [2]


def test_the_window_grows_with_the_live_workers_of_the_queue(broker: Broker, raw: Redis, settings: Settings) -> None:
    job_id = new_job(broker, 50)
    for name in ("a", "b", "c"):
        broker.workers.beat(row(name))
    broker.workers.beat(row("elsewhere", "another-model"))
    raw.zadd(keys.queue_workers(QUEUE), {"dead": broker.connection.now_ms() - 1})
    assert len(issued(broker, job_id)) == 3 * settings.limits.window_per_worker


def test_an_issued_ticket_is_due_after_the_time_for_reissuing(broker: Broker, raw: Redis, settings: Settings) -> None:
    job_id = new_job(broker, 1)
    began = broker.connection.now_ms()
    broker.jobs.issue(job_id, QUEUE)
    assert_due(broker, raw, job_id, 0, after_s=settings.limits.reissue_s, since_ms=began)


def test_a_claim_brings_the_text_and_counts(broker: Broker, raw: Redis, settings: Settings) -> None:
    job_id = new_job(broker, 2)
    began = broker.connection.now_ms()
    found = claim(broker, job_id, 0)
    assert (found.answer, found.attempt, found.input) == (ClaimAnswer.OK, 1, payload(0))
    status = broker.jobs.status(job_id)
    assert (status.state, status.claims) == (JobState.RUNNING, 1)
    assert (status.model_fingerprint, status.pinned_by) == (MINE, "w")
    assert status.started_at is not None
    assert_due(broker, raw, job_id, 0, after_s=settings.lease_s, since_ms=began)
    assert_consistent(broker, raw, job_id)


def test_the_chunk_of_a_live_lease_is_busy(broker: Broker) -> None:
    job_id = new_job(broker)
    claim(broker, job_id, 0, "first")
    assert claim(broker, job_id, 0, "second").answer is ClaimAnswer.BUSY
    assert claim(broker, job_id, 0, "firs").answer is ClaimAnswer.BUSY
    assert claim(broker, job_id, 1, "second").answer is ClaimAnswer.OK


def test_a_worker_with_other_weights_is_refused_and_both_are_named(
    broker: Broker, raw: Redis, settings: Settings
) -> None:
    job_id = new_job(broker)
    claim(broker, job_id, 0, instance="first-worker")
    found = claim(broker, job_id, 1, "t2", instance="second-worker", fingerprint=OTHER)
    assert (found.answer, found.fingerprint, found.input) == (ClaimAnswer.MISMATCH, MINE, b"")
    status = broker.jobs.status(job_id)
    assert status.pinned_by == "first-worker"
    assert status.mismatch == f"second-worker {OTHER}"
    assert status.claims == 1
    assert 0 < due_in_s(broker, raw, job_id, 1) < settings.limits.reissue_s / 2
    assert not raw.hexists(keys.owners(job_id), 1)
    assert claim(broker, job_id, 1, "t3").answer is ClaimAnswer.OK


def test_a_mismatch_does_not_shorten_a_live_lease(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    claim(broker, job_id, 0, "owner")
    until_ms = score(raw, keys.due(job_id), 0)
    assert claim(broker, job_id, 0, "wrong", fingerprint=OTHER).answer is ClaimAnswer.BUSY
    assert score(raw, keys.due(job_id), 0) == until_ms


@pytest.mark.parametrize(
    ("end", "answer"), [("gone", ClaimAnswer.GONE), ("cancel", ClaimAnswer.CANCELLED), ("version", ClaimAnswer.VERSION)]
)
def test_a_ticket_of_a_job_that_wants_nothing_costs_one_question(
    broker: Broker, raw: Redis, end: str, answer: ClaimAnswer
) -> None:
    job_id = new_job(broker)
    if end == "gone":
        raw.delete(keys.job(job_id))
    elif end == "cancel":
        broker.jobs.cancel(job_id)
    else:
        raw.hset(keys.job(job_id), "version", wire.VERSION + 1)
    before = keys_of(raw, job_id)
    assert claim(broker, job_id, 0).answer is answer
    assert broker.jobs.renew(job_id, 0, "t") == answer
    assert not broker.jobs.release(job_id, 0, "t", delay_s=0)
    assert complete(broker, job_id, 0) == answer
    assert keys_of(raw, job_id) == before


def test_renewing_keeps_a_lease_and_brings_back_a_lapsed_one_that_nobody_took(
    broker: Broker, raw: Redis, settings: Settings
) -> None:
    job_id = new_job(broker)
    claim(broker, job_id, 0)
    began = broker.connection.now_ms()
    overdue(raw, job_id, 0)
    assert broker.jobs.renew(job_id, 0, "t") == "ok"
    assert_due(broker, raw, job_id, 0, after_s=settings.lease_s, since_ms=began)
    assert claim(broker, job_id, 0, "other").answer is ClaimAnswer.BUSY


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
    assert claim(broker, job_id, 1, fingerprint=OTHER).answer is ClaimAnswer.MISMATCH


def test_releasing_gives_a_chunk_to_the_next_at_once(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    claim(broker, job_id, 0, "first")
    began = broker.connection.now_ms()
    assert broker.jobs.release(job_id, 0, "first", delay_s=5)
    assert_due(broker, raw, job_id, 0, after_s=5, since_ms=began)
    assert broker.jobs.renew(job_id, 0, "first") == "not_owner"
    found = claim(broker, job_id, 0, "second")
    assert (found.answer, found.attempt) == (ClaimAnswer.OK, 2)
    assert broker.jobs.status(job_id).lapsed == 0
    assert_consistent(broker, raw, job_id)


def test_only_the_owner_renews_and_releases(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)

    def refused(token: str) -> bool:
        renewed, released = broker.jobs.renew(job_id, 0, token), broker.jobs.release(job_id, 0, token, delay_s=0)
        return (renewed, released) == ("not_owner", False)

    assert refused("t")
    assert raw.zscore(keys.due(job_id), 0) is None
    claim(broker, job_id, 0, "mine")
    assert refused("yours")
    assert claim(broker, job_id, 0, "yours").answer is ClaimAnswer.BUSY
    complete(broker, job_id, 0, "mine")
    assert refused("mine")


def test_what_happens_to_a_job_wakes_those_who_wait_for_it(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    work(broker, job_id, 0, 1)
    found: Any = raw.xrange(keys.events(job_id))
    events = [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in found]
    assert events == [{"state": "queued"}, {"state": "running"}, {"chunk": "0"}, {"chunk": "1"}, {"state": "completed"}]


def test_a_process_without_file_descriptors_can_still_give_a_chunk_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = new_job(broker, 1)
    claim(broker, job_id, 0)
    scripts.script_source.cache_clear()
    broker.connection.read_scripts()

    monkeypatch.setattr(scripts, "_text", Mock(side_effect=OSError(24, "Too many open files")))
    scripts.script_source.cache_clear()
    assert broker.jobs.release(job_id, 0, "t", delay_s=1)


def claim_of_new(broker: Broker, job_id: str, token: str = "t", **expected: str) -> tuple[Claim, JobStatus]:
    wanted = {"precision": "fp32", "model": "dummy", **expected}
    return broker.jobs.claim_of_new(job_id, 0, token, Claimant("w", MINE, **wanted))


def test_the_facts_of_a_job_come_with_the_first_claim(broker: Broker, raw: Redis) -> None:
    claim_of_new(broker, new_job(broker))  # Redis knows the script from here on
    job_id = new_job(broker)
    for _ in range(2):  # the second time as redis-py asks after a lost answer
        found, job = claim_of_new(broker, job_id)
        assert (found.answer, found.input) == (ClaimAnswer.OK, payload(0))
        assert (job.id, job.state, job.precision, job.options) == (job_id, JobState.RUNNING, "fp32", OPTIONS)
    assert claim_of_new(broker, job_id, "another")[0].answer is ClaimAnswer.BUSY
    assert complete(broker, job_id, 0) == "ok"
    assert claim_of_new(broker, job_id, "late")[0].answer is ClaimAnswer.DONE
    assert_consistent(broker, raw, job_id)


@pytest.mark.parametrize("expected", [{"precision": "fp16"}, {"model": "another"}])
def test_a_worker_does_not_claim_what_it_can_not_encode(broker: Broker, raw: Redis, expected: dict[str, str]) -> None:
    job_id = new_job(broker)
    before = {key: raw.dump(key) for key in raw.scan_iter()}
    found, job = claim_of_new(broker, job_id, **expected)
    assert (found.answer, job.state) == (ClaimAnswer.OTHER, JobState.QUEUED)
    assert {key: raw.dump(key) for key in raw.scan_iter()} == before


def test_the_first_claim_of_a_job_that_is_gone_cancelled_or_unreadable(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    broker.jobs.cancel(job_id)
    assert claim_of_new(broker, job_id)[0].answer is ClaimAnswer.CANCELLED
    raw.delete(keys.job(job_id))
    with pytest.raises(JobNotFound):
        claim_of_new(broker, job_id)
    raw.set(keys.job(job_id), "of another program")
    with pytest.raises(BrokerRefused):
        claim_of_new(broker, job_id)
