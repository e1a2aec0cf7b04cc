"""Failed records queued once more and listed, and the error budget: every answer, with counts that stay true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from embedctl.jobs import job as job_module
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.store import Added, JobState
from embedctl.waiting.results import FailedRecord
from embedctl_config import keys, wire
from embedctl_config.errors import (
    BrokerUnavailable,
    JobCancelled,
    JobError,
    JobFailed,
    JobLost,
    JobNotFound,
    JobUnfinished,
)
from embedctl_config.wire import ChunkInput, ErrorCode
from tests.support.store import add, claim, complete, keys_of, look_after, new_job, row, spec, take, work


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

    for name in ("failed_chunks", "retry", "seal"):
        monkeypatch.setattr(broker.jobs, name, failing_once(getattr(broker.jobs, name)))
    assert Job(job_id, broker).retry_failed() == 2
    assert len(failed) == 3
    assert broker.jobs.status(job_id).sealed
    assert Job(new_job(broker, 0), broker).retry_failed() == 0


@pytest.mark.parametrize("lives", [True, False])
def test_a_retry_goes_on_though_its_process_died(
    broker: Broker, raw: Redis, caplog: pytest.LogCaptureFixture, lives: bool
) -> None:
    job_id = half_failed(broker)
    broker.jobs.retry(job_id, 0, 3, "p")
    if not lives:
        raw.delete(keys.producer(job_id))
    look_after(broker, job_id, new_job(broker, 1))
    assert broker.jobs.status(job_id).sealed is not lives
    assert (f"job {job_id}: the process that retried or resumed it died" in caplog.text) is not lives


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
    assert not raw.exists(keys.owners(job_id), keys.attempts(job_id))
    assert take(broker) is None
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
    assert not raw.exists(keys.owners(job_id))


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


def test_a_long_search_keeps_the_right_to_retry(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "_CHUNKS_TOGETHER", 1)
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


DIM, ROWS = 1024, 500


def wide_job(broker: Broker, chunks: int = 20, width: int = 0, **changes: object) -> str:
    """Chunks of many records, whose ids have at least this width."""
    job_id, _ = broker.jobs.create(spec(**changes))
    for index in range(chunks):
        ids = [f"id-{index * ROWS + at:0{width}}" for at in range(ROWS)]
        data = wire.encode_input(ChunkInput(index * ROWS, bytes(ROWS), [b"text"] * ROWS, ids))
        broker.jobs.add(job_id, index, data, digest=wire.digest_of(data), rows=ROWS, token="p")
    broker.jobs.seal(job_id, chunks)
    return job_id


def bytes_sent(raw: Redis) -> int:
    return int(raw.info("stats")["total_net_output_bytes"])


def test_one_error_of_ten_thousand_records_is_read_without_their_vectors(broker: Broker, raw: Redis) -> None:
    job_id = wide_job(broker)
    for chunk in range(20):
        work(broker, job_id, chunk, dim=DIM, failed=(7,) if chunk == 11 else ())
    before = bytes_sent(raw)
    errors = Job(job_id, broker).errors()
    read = bytes_sent(raw) - before
    assert errors == [FailedRecord(11 * ROWS + 7, f"id-{11 * ROWS + 7}", ErrorCode.EMPTY, "empty")]
    assert read < 20 * ROWS * DIM * 4 / 100


def test_a_head_longer_than_what_is_read_first_is_read_on(broker: Broker) -> None:
    job_id = wide_job(broker, 1, width=900)
    work(broker, job_id, 0, dim=DIM, failed=tuple(range(ROWS)))
    errors = Job(job_id, broker).errors()
    assert [(each.position, each.id) for each in errors] == [(at, f"id-{at:0900}") for at in range(ROWS)]


def test_records_that_were_retried_are_listed_as_they_are_now(broker: Broker) -> None:
    broker.workers.beat(row())
    job_id = wide_job(broker, 3)
    for chunk in range(3):
        work(broker, job_id, chunk, dim=DIM, failed=(1, 2, 3) if chunk != 1 else ())
    job = Job(job_id, broker)
    assert [error.position for error in job.errors()] == [1, 2, 3, 1001, 1002, 1003]
    assert job.retry_failed() == 6
    work(broker, job_id, 3, dim=DIM, failed=(1,))
    work(broker, job_id, 4, dim=DIM, failed=())
    assert [error.position for error in job.errors()] == [2]
    assert job.retry_failed() == 1
    work(broker, job_id, 5, dim=DIM, failed=())
    assert job.errors() == []


def test_a_lost_result_is_no_chunk_without_errors(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3)
    work(broker, job_id, 0, 1, 2)
    raw.unlink(keys.chunk_result(job_id, 1))
    with pytest.raises(JobLost, match="chunks 1 to 1"):
        Job(job_id, broker).errors()
