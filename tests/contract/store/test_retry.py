"""Failed records queued once more, and the error budget: every answer, with counts that stay true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis as redis_py

from embedctl import enqueue_embeddings, retry
from embedctl.broker import Broker
from embedctl.job import Job
from embedctl.store import Added, Completed, JobState
from embedctl_config import keys, wire
from embedctl_config.errors import (
    BrokerUnavailable,
    CorpusChanged,
    JobCancelled,
    JobError,
    JobFailed,
    JobLost,
    JobNotFound,
    JobUnfinished,
)
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.settings import Settings
from tests.support.store import (
    DIM,
    MINE,
    OPTIONS,
    add,
    assert_consistent,
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


def encode_again(broker: Broker, job_id: str, chunk: int, *, failed: bool = False) -> None:
    """Complete a chunk that retries records, with whatever it holds; its first record may fail again."""
    found = claim(broker, job_id, chunk, "again")
    assert found.answer == "ok"
    source = wire.decode_input(found.input)
    payload = wire.encode_result(
        wire.ChunkResult(
            first=source.first,
            rows=len(source),
            dim=DIM,
            digest=wire.digest_of(found.input),
            fingerprint=job_fingerprint(MINE, OPTIONS),
            precision="fp32",
            backend="dummy",
            vectors=bytes(4 * DIM * len(source)),
            checksums=source.row_checksums(),
            positions=source.positions,
            errors=[wire.RecordError(0, wire.ErrorCode.EMPTY, "empty")] if failed else [],
        )
    )
    again = wire.encode_input(source.select([0])) if failed else b""
    report = Completed(len(source) - failed, int(failed), 0, tokens=1, dim=DIM, failed_input=again)
    assert broker.jobs.complete(job_id, chunk, "again", payload, report, fingerprint=MINE) == "ok"


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


def test_a_job_whose_failed_records_were_encoded_after_all_has_completed(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = half_failed(broker, ttl_s=keys.UNENDED_TTL_S)
    assert Job(job_id, broker).retry_failed() == 2
    status = broker.jobs.status(job_id)
    assert (status.state.ended, status.sealed, status.chunks, status.failed) == (False, True, 5, 0)
    for chunk in (3, 4):
        encode_again(broker, job_id, chunk)
    status = broker.jobs.status(job_id)
    assert (status.state, status.records, status.done, status.failed) == (JobState.COMPLETED, 6, 6, 0)
    assert status.waiting_bytes == 0
    assert raw.zscore(keys.ACTIVE, job_id) is None


def test_nothing_failed_leaves_an_ended_job_as_it_is(broker: Broker) -> None:
    job_id = new_job(broker, 2)
    work(broker, job_id, 0, 1)
    assert broker.jobs.retry(job_id, 0, 2, "p") == 0
    assert Job(job_id, broker).retry_failed() == 0
    assert broker.jobs.status(job_id).state is JobState.COMPLETED


def test_the_same_records_are_not_retried_twice_at_once(broker: Broker) -> None:
    job_id = half_failed(broker)
    assert broker.jobs.retry(job_id, 0, 3, "p") == 1
    assert broker.jobs.retry(job_id, 0, 4, "p") == 0
    assert broker.jobs.status(job_id).chunks == 4


def test_a_retry_that_died_is_taken_up_by_the_next(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = half_failed(broker)
    broker.jobs.retry(job_id, 0, 3, "dead")
    with pytest.raises(JobError, match="another process"):
        Job(job_id, broker).retry_failed()
    raw.delete(keys.producer(job_id))
    assert Job(job_id, broker).retry_failed() == 1
    assert broker.jobs.status(job_id).sealed
    for chunk in (3, 4):
        encode_again(broker, job_id, chunk)
    assert broker.jobs.status(job_id).state is JobState.COMPLETED


def test_a_retry_that_stood_still_while_others_went_on_is_no_loss(
    broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = half_failed(broker)
    seal, others = broker.jobs.seal, []

    def stand_still(*asked: Any) -> None:
        monkeypatch.setattr(broker.jobs, "seal", seal)
        raw.delete(keys.producer(job_id))
        assert broker.jobs.close_retry(job_id)
        encode_again(broker, job_id, 3, failed=True)
        encode_again(broker, job_id, 4)
        others.append(Job(job_id, broker).retry_failed())
        seal(*asked)

    monkeypatch.setattr(broker.jobs, "seal", stand_still)
    assert (Job(job_id, broker).retry_failed(), others) == (2, [1])
    encode_again(broker, job_id, 5)
    assert broker.jobs.status(job_id).state is JobState.COMPLETED


def test_a_retry_that_died_does_not_keep_its_job_from_ending(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = half_failed(broker)
    broker.jobs.retry(job_id, 0, 3, "dead")
    encode_again(broker, job_id, 3)
    assert not broker.jobs.close_retry(job_id)  # its process may still be alive
    assert not broker.jobs.status(job_id).state.ended
    raw.delete(keys.producer(job_id))
    assert broker.jobs.close_retry(job_id)
    status = broker.jobs.status(job_id)
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 5, 1)
    assert (status.sealed, status.chunks, status.original_chunks) == (True, 4, 3)
    assert Job(job_id, broker).retry_failed() == 1


def test_the_same_corpus_submitted_again_closes_a_retry_that_died(
    settings: Settings, broker: Broker, raw: redis_py.Redis
) -> None:
    texts = [f"text {chunk} {row}" for chunk in range(2) for row in range(2)]  # those of the chunks of `work`
    job = enqueue_embeddings(texts, chunk_size=2, idempotency_key="k", settings=settings)
    work(broker, job.id, 0, failed=1)
    work(broker, job.id, 1)
    broker.jobs.retry(job.id, 0, 2, "dead")
    raw.delete(keys.producer(job.id))
    again = enqueue_embeddings(texts, chunk_size=2, idempotency_key="k", settings=settings)
    assert again.id == job.id
    assert again.status().sealed
    assert not again.status().stalled


def test_the_reaper_seals_no_job_whose_corpus_is_not_all_there(broker: Broker) -> None:
    job_id = new_job(broker, 2, seal=False)
    work(broker, job_id, 0, 1)
    assert not broker.jobs.close_retry(job_id)
    assert broker.jobs.status(job_id).state is JobState.SUBMITTING


def test_a_retry_waits_for_a_redis_that_is_away_for_a_moment(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = half_failed(broker)
    calls: list[str] = []
    for name in ("failed_chunks", "retry", "seal", "issue"):
        monkeypatch.setattr(broker.jobs, name, failing_once(getattr(broker.jobs, name), calls))
    assert Job(job_id, broker).retry_failed() == 2
    assert len(calls) == 4
    assert broker.jobs.status(job_id).sealed


def test_a_retry_that_redis_lost_is_not_called_another_corpus(
    broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = half_failed(broker)
    before = {key: (raw.dump(key) or b"", raw.pttl(key)) for key in keys_of(raw, job_id)}
    seal = broker.jobs.seal

    def go_back(job_id: str, chunks: int) -> None:
        raw.delete(*keys_of(raw, job_id))
        for key, (data, left_ms) in before.items():
            raw.restore(key, left_ms, data)
        seal(job_id, chunks)

    monkeypatch.setattr(broker.jobs, "seal", go_back)
    with pytest.raises(JobLost, match="retry its failed records once more"):
        Job(job_id, broker).retry_failed()
    monkeypatch.setattr(broker.jobs, "seal", seal)
    assert Job(job_id, broker).retry_failed() == 2


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


def test_every_key_of_a_retried_job_has_a_lifetime_and_goes_with_it(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = half_failed(broker)
    Job(job_id, broker).retry_failed()
    encode_again(broker, job_id, 3)
    assert {key for key in keys_of(raw, job_id) if raw.ttl(key) < 0} == set()
    Job(job_id, broker).discard()
    assert keys_of(raw, job_id) == set()


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


@pytest.mark.parametrize("end", ["cancel", "max_errors"])
def test_an_ended_jobs_text_waits_for_nobody(broker: Broker, end: str) -> None:
    job_id = new_job(broker, 3, seal=False, max_errors=0)
    assert broker.jobs.status(job_id).waiting_bytes > 0
    if end == "cancel":
        broker.jobs.cancel(job_id)
    else:
        work(broker, job_id, 0, failed=1)
    assert broker.jobs.status(job_id).waiting_bytes == 0


def test_a_budget_that_is_kept_changes_nothing(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = half_failed(broker, max_errors=2, max_errors_share=0.34)
    status = broker.jobs.status(job_id)
    assert (status.state, status.stopped_by) == (JobState.COMPLETED_WITH_ERRORS, None)
    assert_consistent(broker, raw, job_id)


def test_discarding_a_job_that_its_budget_ended_leaves_nothing_of_it(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(broker, 3, max_errors=0)
    work(broker, job_id, 0, failed=1)
    assert broker.upkeep.free_slice(job_id, 3, results=False)  # as the reaper does
    assert not raw.exists(*(keys.chunk_input(job_id, chunk) for chunk in range(3)))
    assert broker.jobs.result(job_id, 0) is not None
    Job(job_id, broker).discard()
    assert keys_of(raw, job_id) == set()


def test_saying_again_what_was_said_is_no_mistake(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = half_failed(broker)
    chunks = broker.jobs.status(job_id).chunks
    [failed, *_] = broker.jobs.failed_chunks(job_id, 0, chunks)
    moved = broker.jobs.retry(job_id, failed, chunks, "p")
    assert broker.jobs.retry(job_id, failed, chunks, "p") == moved > 0
    broker.jobs.seal(job_id, chunks + 1)
    broker.jobs.seal(job_id, chunks + 1)
    assert broker.jobs.status(job_id).chunks == chunks + 1


@pytest.mark.parametrize("retried", ["waits", "done", "failed again", "retried again"])
@pytest.mark.parametrize("lost", ["the result", "the retried one's"])
def test_a_lost_result_of_retried_records_is_repaired_with_the_same_corpus(
    broker: Broker, raw: redis_py.Redis, retried: str, lost: str
) -> None:
    if (retried, lost) == ("waits", "the retried one's"):
        pytest.skip("it has no result yet")
    job_id = half_failed(broker)
    assert Job(job_id, broker).retry_failed() == 2  # chunks 3 and 4
    encode_again(broker, job_id, 4)
    if retried != "waits":
        encode_again(broker, job_id, 3, failed=retried != "done")
    if retried == "retried again":
        assert Job(job_id, broker).retry_failed() == 1
        encode_again(broker, job_id, 5)
    raw.delete(keys.chunk_result(job_id, 0 if lost == "the result" else 3))
    assert add(broker, job_id, 0, token="again")[0] is Added.OK
    assert add(broker, job_id, 1, token="again")[0] is Added.SKIPPED
    assert not broker.jobs.status(job_id).state.ended
    assert claim(broker, job_id, 3, "late").answer == "done"
    encode_again(broker, job_id, 0, failed=True)
    status = broker.jobs.status(job_id)
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 5, 1)
    assert (status.chunks_done, status.waiting_bytes) == (status.chunks, 0)
    assert [error.position for error in Job(job_id, broker).errors()] == [0]
    assert Job(job_id, broker).retry_failed() == 1
    encode_again(broker, job_id, status.chunks)
    status = broker.jobs.status(job_id)
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED, 6, 0)
    assert Job(job_id, broker).errors() == []
    assert {key for key in keys_of(raw, job_id) if raw.ttl(key) < 0} == set()
