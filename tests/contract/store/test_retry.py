"""Failed records queued once more, and the error budget: every answer, with counts that stay true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from embedctl import retry
from embedctl.broker import Broker
from embedctl.job import Job
from embedctl.store import Added, JobState
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerUnavailable, JobCancelled, JobError, JobFailed, JobNotFound, JobUnfinished
from tests.support.store import add, claim, complete, issued, keys_of, new_job, work


def half_failed(broker: Broker, **changes: Any) -> str:
    """An ended job of three chunks of two records. One record failed in chunk 0 and one in chunk 2."""
    job_id = new_job(broker, 3, **changes)
    work(broker, job_id, 0, failed=1)
    work(broker, job_id, 1)
    work(broker, job_id, 2, failed=1)
    return job_id


def test_failed_records_move_to_a_new_chunk_and_the_job_is_open_again(broker: Broker) -> None:
    job_id = half_failed(broker)
    assert broker.jobs.failed_chunks(job_id, 0, 3) == [0, 2]
    for wrong in (2, 4):
        with pytest.raises(JobError, match="another process"):
            broker.jobs.retry(job_id, 0, wrong, "p")
    assert broker.jobs.retry(job_id, 0, 3, "p") == 1
    assert broker.jobs.retry(job_id, 1, 4, "p") == 0  # nothing of it failed
    status = broker.jobs.status(job_id)
    assert (status.state, status.sealed, status.chunks) == (JobState.SUBMITTING, False, 4)
    assert (status.records, status.done, status.failed, status.ended_at) == (6, 4, 1, None)
    assert broker.jobs.retried_as(job_id, 0) == 3
    assert broker.jobs.retried_as(job_id, 2) is None
    moved = wire.decode_input(broker.jobs.input(job_id, 3) or b"")
    assert (moved.positions, moved.texts) == ([0], [b"text 0 0"])
    assert status.waiting_bytes == len(broker.jobs.input(job_id, 3) or b"")
    assert broker.jobs.failed_chunks(job_id, 0, 3) == [2]


def test_a_retry_waits_for_a_redis_that_is_away_for_a_moment(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = half_failed(broker)
    failed: list[str] = []

    def failing_once(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            if method.__name__ not in failed:
                failed.append(method.__name__)
                raise BrokerUnavailable("away")
            return method(*args)

        return call

    for name in ("failed_chunks", "retry", "seal", "issue"):
        monkeypatch.setattr(broker.jobs, name, failing_once(getattr(broker.jobs, name)))
    assert Job(job_id, broker).retry_failed() == 2
    assert len(failed) == 4
    assert broker.jobs.status(job_id).sealed
    assert Job(new_job(broker, 0), broker).retry_failed() == 0


def test_a_job_that_goes_on_is_cancelled_or_gone_can_not_be_retried(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2)
    work(broker, job_id, 0, failed=1)
    with pytest.raises(JobUnfinished, match="has not ended"):
        broker.jobs.retry(job_id, 0, 2, "p")
    cancelled = new_job(broker, 1)
    broker.jobs.cancel(cancelled)
    with pytest.raises(JobCancelled):
        Job(cancelled, broker).retry_failed()
    gone = half_failed(broker)
    raw.delete(*keys_of(raw, gone))
    with pytest.raises(JobNotFound):
        broker.jobs.retry(gone, 0, 3, "p")
    assert keys_of(raw, gone) == set()


def test_more_failed_records_than_the_budget_end_the_job(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 4, max_errors=2)
    work(broker, job_id, 0, failed=2)
    assert not broker.jobs.status(job_id).state.ended
    claim(broker, job_id, 3, "elsewhere")
    work(broker, job_id, 1, failed=1)
    status = broker.jobs.status(job_id)
    assert (status.state, status.stopped_by) == (JobState.FAILED, "max_errors")
    assert status.ended_at is not None
    assert not raw.exists(keys.due(job_id), keys.owners(job_id), keys.attempts(job_id))
    assert issued(broker, job_id, "q") == []
    assert claim(broker, job_id, 2).answer == "done"
    assert broker.jobs.renew(job_id, 3, "elsewhere") == "done"
    assert complete(broker, job_id, 3, "elsewhere") == "refused"
    with pytest.raises(JobError, match="error budget"):
        broker.jobs.retry(job_id, 0, 4, "p")


def test_a_share_of_all_records_counts_once_all_are_known(broker: Broker) -> None:
    job_id = new_job(broker, 2, seal=False, max_errors_share=0.5)
    work(broker, job_id, 0, failed=2)
    add(broker, job_id, 2)
    assert broker.jobs.status(job_id).stopped_by is None
    broker.jobs.seal(job_id, 3)
    assert broker.jobs.status(job_id).stopped_by is None
    work(broker, job_id, 1, failed=2)
    assert broker.jobs.status(job_id).stopped_by == "max_errors"


def test_sealing_does_not_revive_a_job_that_its_budget_has_ended(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2, seal=False, max_errors=0)
    work(broker, job_id, 0, failed=1)
    assert add(broker, job_id, 2)[0] is Added.STOPPED
    ended_at = broker.jobs.status(job_id).ended_at
    for _ in range(2):
        with pytest.raises(JobFailed, match="error budget"):
            broker.jobs.seal(job_id, 2)
    status = broker.jobs.status(job_id)
    assert (status.state, status.stopped_by, status.ended_at) == (JobState.FAILED, "max_errors", ended_at)
    assert not raw.exists(keys.due(job_id))


def test_one_who_looks_while_another_retries_is_told_so(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = half_failed(broker)
    assert broker.jobs.retry(job_id, 0, 3, "another") == 1

    def late(*args: object) -> list[int]:
        assert broker.jobs.retry(job_id, 2, 4, "another") == 1
        broker.jobs.seal(job_id, 5)
        return []  # what it retries is encoded by now

    monkeypatch.setattr(broker.jobs, "failed_chunks", late)
    with pytest.raises(JobError, match="being retried by another process"):
        Job(job_id, broker).retry_failed()


def test_a_long_search_for_failed_records_keeps_the_right_to_retry(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "_SLICE", 1)
    monkeypatch.setattr(keys, "PRODUCER_LEASE_S", 600)  # more than any machine takes for a step
    job_id = half_failed(broker)
    found = broker.jobs.failed_chunks

    def slow(job_id: str, start: int, count: int) -> list[int]:
        if start == 1:
            raw.pexpire(keys.producer(job_id), 300_000)  # chunk 1 took nearly the whole lease
        if start == 2:
            assert raw.pttl(keys.producer(job_id)) > 300_000
        return found(job_id, start, count)

    monkeypatch.setattr(broker.jobs, "failed_chunks", slow)
    assert Job(job_id, broker).retry_failed() == 2
