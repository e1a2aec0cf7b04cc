"""Failed records queued once more, and the error budget: every answer, with counts that stay true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis as redis_py

from embedctl import retry
from embedctl.broker import Broker
from embedctl.job import Job
from embedctl.store import Added, JobState
from embedctl_config import keys, wire
from embedctl_config.errors import (
    BrokerUnavailable,
    CorpusChanged,
    JobCancelled,
    JobError,
    JobFailed,
    JobNotFound,
    JobUnfinished,
)
from tests.support.store import (
    add,
    claim,
    complete,
    issued,
    keys_of,
    new_job,
    work,
)


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
    assert broker.jobs.retry(job_id, 0, 3, "p") == 1
    status = broker.jobs.status(job_id)
    assert (status.state, status.sealed, status.chunks) == (JobState.SUBMITTING, False, 4)
    assert (status.records, status.done, status.failed, status.ended_at) == (6, 4, 1, None)
    assert broker.jobs.retried_as(job_id, 0) == 3
    assert broker.jobs.retried_as(job_id, 2) is None
    moved = wire.decode_input(broker.jobs.input(job_id, 3) or b"")
    assert (moved.positions, moved.texts) == ([0], [b"text 0 0"])
    assert status.waiting_bytes == len(broker.jobs.input(job_id, 3) or b"")
    assert broker.jobs.failed_chunks(job_id, 0, 3) == [2]


def test_nothing_failed_leaves_an_ended_job_as_it_is(broker: Broker) -> None:
    job_id = new_job(broker, 2)
    work(broker, job_id, 0, 1)
    assert broker.jobs.retry(job_id, 0, 2, "p") == 0
    assert Job(job_id, broker).retry_failed() == 0
    assert broker.jobs.status(job_id).state is JobState.COMPLETED


def test_a_retry_waits_for_a_redis_that_is_away_for_a_moment(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = half_failed(broker)
    calls: list[str] = []
    for name in ("failed_chunks", "retry", "seal", "issue"):
        monkeypatch.setattr(broker.jobs, name, failing_once(getattr(broker.jobs, name), calls))
    assert Job(job_id, broker).retry_failed() == 2
    assert len(calls) == 4
    assert broker.jobs.status(job_id).sealed


def test_one_who_looks_while_another_retries_is_told_so(
    broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = half_failed(broker)
    assert broker.jobs.retry(job_id, 0, 3, "another") == 1

    def late(*args: object) -> list[int]:
        assert broker.jobs.retry(job_id, 2, 4, "another") == 1
        broker.jobs.seal(job_id, 5)
        return []  # what it retries is encoded by now

    monkeypatch.setattr(broker.jobs, "failed_chunks", late)
    with pytest.raises(JobError, match="being retried by another process"):
        Job(job_id, broker).retry_failed()


def failing_once(method: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """The method, but its first call finds no Redis."""

    def call(*args: object) -> Any:
        if method.__name__ not in calls:
            calls.append(method.__name__)
            raise BrokerUnavailable("away")
        return method(*args)

    return call


def test_a_long_search_for_failed_records_keeps_the_right_to_retry(
    broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
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


def test_a_chunk_is_put_at_the_end_and_nowhere_else(broker: Broker) -> None:
    job_id = half_failed(broker)
    for wrong in (2, 4):
        with pytest.raises(JobError, match="another process"):
            broker.jobs.retry(job_id, 0, wrong, "p")
    assert broker.jobs.status(job_id).chunks == 3


def test_a_job_that_goes_on_can_not_be_retried(broker: Broker) -> None:
    job_id = new_job(broker, 2)
    work(broker, job_id, 0, failed=1)
    with pytest.raises(JobUnfinished, match="has not ended"):
        broker.jobs.retry(job_id, 0, 2, "p")
    with pytest.raises(JobUnfinished):
        broker.jobs.retry(new_job(broker, 1, seal=False), 0, 1, "p")


def test_a_job_that_is_cancelled_or_gone_can_not_be_retried(broker: Broker, raw: redis_py.Redis) -> None:
    cancelled = new_job(broker, 1)
    broker.jobs.cancel(cancelled)
    with pytest.raises(JobCancelled):
        Job(cancelled, broker).retry_failed()
    gone = half_failed(broker)
    raw.delete(*keys_of(raw, gone))
    with pytest.raises(JobNotFound):
        broker.jobs.retry(gone, 0, 3, "p")
    assert keys_of(raw, gone) == set()


def test_the_corpus_of_a_retried_job_is_still_the_one_it_was_begun_with(broker: Broker) -> None:
    job_id = half_failed(broker)
    Job(job_id, broker).retry_failed()
    for chunk in range(3):
        assert add(broker, job_id, chunk, token="again")[0] is Added.SKIPPED
    assert add(broker, job_id, 3, token="again") == (Added.SEALED, 3)
    broker.jobs.seal(job_id, 3)
    with pytest.raises(CorpusChanged):
        broker.jobs.seal(job_id, 4)


def test_more_failed_records_than_the_budget_end_the_job(broker: Broker, raw: redis_py.Redis) -> None:
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


def test_sealing_may_spend_the_budget(broker: Broker) -> None:
    job_id = new_job(broker, 2, seal=False, max_errors_share=0.25)
    work(broker, job_id, 0, failed=2)
    broker.jobs.seal(job_id, 2)
    assert broker.jobs.status(job_id).state is JobState.FAILED


def test_a_producer_is_told_that_the_budget_is_spent(broker: Broker) -> None:
    job_id = new_job(broker, 2, seal=False, max_errors=0)
    work(broker, job_id, 0, failed=1)
    assert add(broker, job_id, 2)[0] is Added.STOPPED
    assert broker.jobs.status(job_id).chunks == 2


def test_sealing_does_not_revive_a_job_that_its_budget_has_ended(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(broker, 2, seal=False, max_errors=0)
    work(broker, job_id, 0, failed=1)
    ended_at = broker.jobs.status(job_id).ended_at
    for _ in range(2):
        with pytest.raises(JobFailed, match="error budget"):
            broker.jobs.seal(job_id, 2)
    status = broker.jobs.status(job_id)
    assert (status.state, status.stopped_by, status.ended_at) == (JobState.FAILED, "max_errors", ended_at)
    assert not raw.exists(keys.due(job_id))


def test_a_spent_budget_at_the_seal_is_told_likewise_when_the_answer_was_lost(broker: Broker) -> None:
    job_id = new_job(broker, 2, seal=False, max_errors_share=0.25)
    work(broker, job_id, 0, failed=2)
    for _ in range(2):
        broker.jobs.seal(job_id, 2)
        assert broker.jobs.status(job_id).state is JobState.FAILED


@pytest.mark.parametrize("done", [False, True])
def test_a_lost_result_of_retried_records_is_repaired_with_the_same_corpus(
    broker: Broker, raw: redis_py.Redis, done: bool
) -> None:
    job_id = half_failed(broker)
    assert Job(job_id, broker).retry_failed() == 2  # chunks 3 and 4
    work(broker, job_id, *([3, 4] if done else [4]))
    raw.delete(keys.chunk_result(job_id, 0))
    assert add(broker, job_id, 0, token="again")[0] is Added.OK
    assert claim(broker, job_id, 3, "late").answer == "done"
    work(broker, job_id, 0, failed=1)
    status = broker.jobs.status(job_id)
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 5, 1)
    assert (status.chunks_done, status.waiting_bytes) == (status.chunks, 0)
