"""A job that is stopped keeps what is done, and its corpus may resume it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from redis import Redis

from embedctl.destinations.files import fetch
from embedctl.destinations.numbers import Dtype, Numbers
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.queueing.retrying import TimeLimit
from embedctl.store import JobState
from embedctl.waiting.submission import Submission
from embedctl_config import keys, wire
from embedctl_config.errors import CorpusChanged, JobCancelled, JobFailed, JobStopped
from tests.support.store import DIM, TTL_S, claim, complete, look_after, new_job, payload, row, work


def inputs(raw: Redis, job_id: str, chunks: int = 6) -> list[int]:
    return [chunk for chunk in range(chunks) if raw.exists(keys.chunk_input(job_id, chunk))]


def stopped_job(broker: Broker, *, seal: bool = True, **changes: object) -> str:
    """A job of 6 chunks of 2 records, of which chunks 1 and 3 are done when it is stopped; a record of 3 failed."""
    job_id = new_job(broker, 6, seal=seal, **changes)
    work(broker, job_id, 1)
    work(broker, job_id, 3, failed=1)
    claim(broker, job_id, 0, "running")
    broker.jobs.hold(job_id, "p", lease_s=0)
    Job(job_id, broker).stop()
    return job_id


def submit_again(broker: Broker, job_id: str, chunks: int = 6, word: str = "text") -> None:
    with Submission(broker, broker.jobs.status(job_id), None, TimeLimit.from_now(None), "token") as submission:
        submission.reopen()
        for chunk in range(chunks):
            submission.add(wire.decode_input(payload(chunk, word=word)))
        submission.seal()


@pytest.mark.parametrize(("seal", "ttl_s"), [(True, TTL_S), (False, TTL_S), (True, 2.0 * keys.UNENDED_TTL_S)])
def test_what_is_done_stays_and_the_rest_is_freed(
    broker: Broker, raw: Redis, tmp_path: Path, seal: bool, ttl_s: float
) -> None:
    job_id = stopped_job(broker, seal=seal, ttl_s=ttl_s)
    status = broker.jobs.status(job_id)
    assert (status.state, status.stopped_by) == (JobState.STOPPED, "stop")
    assert status.state.ended
    assert raw.hget(keys.job(job_id), "state") == b"failed"
    assert (status.records, status.done, status.failed, status.waiting_bytes) == (12, 3, 1, 0)
    look_after(broker, job_id)
    assert inputs(raw, job_id) == [3]  # a failed record's text, for a retry once the job has gone on
    assert raw.zscore(keys.ACTIVE, job_id) is None
    job = Job(job_id, broker)
    assert job.wait().state is JobState.STOPPED
    assert [len(chunk.positions) for chunk in job.iter_results()] == [0, 2, 0, 2, 0, 0]
    there = ~np.isnan(job.vectors()).any(axis=1)
    assert np.flatnonzero(there).tolist() == [2, 3, 6, 7]  # the stand-in for a worker gives failed records a vector
    assert [error.position for error in job.errors()] == [6]
    assert claim(broker, job_id, 4) is None
    assert complete(broker, job_id, 0, "running") == "refused"
    assert broker.jobs.renew(job_id, 0, "running") == "done"
    fetch(job, tmp_path / "v.jsonl")
    positions = [json.loads(line)["position"] for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert positions == [2, 3, 6, 7]


def test_a_spent_error_budget_keeps_what_is_done_too(broker: Broker, tmp_path: Path) -> None:
    job_id = new_job(broker, 4, max_errors=0)
    work(broker, job_id, 0)
    work(broker, job_id, 2, failed=1)
    job = Job(job_id, broker)
    assert broker.jobs.status(job_id).state is JobState.FAILED
    with pytest.raises(JobFailed, match="error budget"):
        list(job.iter_results())
    with pytest.raises(JobFailed, match=r"What is done is in .*v\.jsonl"):
        fetch(job, tmp_path / "v.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [(line["position"], "embedding" in line) for line in lines] == [(0, True), (1, True), (4, False), (5, True)]


def test_it_is_stopped_once_and_an_ended_job_not_at_all(broker: Broker) -> None:
    job_id = stopped_job(broker, idempotency_key="k")
    assert broker.jobs.with_key("k") == job_id
    ended_at = broker.jobs.status(job_id).ended_at
    assert Job(job_id, broker).stop().ended_at == ended_at
    assert Job(job_id, broker).cancel().state is JobState.STOPPED
    done = new_job(broker, 1)
    work(broker, done, 0)
    assert Job(done, broker).stop().state is JobState.COMPLETED
    cancelled = new_job(broker, 1)
    broker.jobs.cancel(cancelled)
    with pytest.raises(JobCancelled):
        Job(cancelled, broker).stop()


@pytest.mark.parametrize(("seal", "freed"), [(True, True), (False, False)])
def test_its_corpus_continues_it(broker: Broker, raw: Redis, seal: bool, freed: bool) -> None:
    broker.workers.beat(row())
    job_id = stopped_job(broker, seal=seal)
    if freed:
        look_after(broker, job_id)
    submit_again(broker, job_id)
    status = broker.jobs.status(job_id)
    assert (status.state, status.stopped_by, status.records) == (JobState.RUNNING, None, 12)
    assert not {b"resumed_to", b"resumed_below", b"resumed_by"} & set(raw.hkeys(keys.job(job_id)))
    work(broker, job_id, 0, 2, 4, 5)
    job = Job(job_id, broker)
    assert job.status().state is JobState.COMPLETED_WITH_ERRORS
    assert not np.isnan(job.vectors()).any()
    assert [error.position for error in job.errors()] == [6]
    assert job.retry_failed() == 1
    work(broker, job_id, 6)
    assert job.status().state is JobState.COMPLETED


def test_another_corpus_does_not_continue_it(broker: Broker) -> None:
    job_id = stopped_job(broker)
    with pytest.raises(CorpusChanged):
        submit_again(broker, job_id, word="other")
    Job(job_id, broker).stop()
    with pytest.raises(CorpusChanged):
        submit_again(broker, job_id, chunks=4)
    Job(job_id, broker).stop()
    with pytest.raises(CorpusChanged):
        submit_again(broker, job_id, chunks=7)


def test_a_producer_is_told_and_does_not_continue_it_by_itself(broker: Broker) -> None:
    job_id = new_job(broker, 2, seal=False)
    broker.jobs.hold(job_id, "p", lease_s=0)
    with Submission(broker, broker.jobs.status(job_id), None, TimeLimit.from_now(None), "token") as submission:
        for chunk in range(2):
            submission.add(wire.decode_input(payload(chunk)))
        Job(job_id, broker).stop()
        with pytest.raises(JobStopped, match=f"--resume {job_id}"):
            submission.add(wire.decode_input(payload(2)))
    assert broker.jobs.status(job_id).records == 4


def test_stopped_in_a_retry_it_keeps_the_first_errors_and_does_not_go_on(broker: Broker) -> None:
    job_id = new_job(broker, 2)
    work(broker, job_id, 0, failed=1)
    work(broker, job_id, 1)
    job = Job(job_id, broker)
    assert job.retry_failed() == 1
    job.stop()
    look_after(broker, job_id)
    assert [error.position for error in job.errors()] == [0]
    assert job.vectors().shape == (4, DIM)
    with pytest.raises(JobStopped, match="submit the corpus as a new job"):
        submit_again(broker, job_id, 2)
    with pytest.raises(JobStopped):
        job.retry_failed()


def test_int8_takes_its_ranges_from_what_is_done(broker: Broker, tmp_path: Path) -> None:
    numbers = Numbers(Dtype.INT8)
    job_id = stopped_job(broker)
    fetch(Job(job_id, broker), tmp_path / "v.npy", numbers=numbers)
    assert np.load(tmp_path / "v.npy").dtype == np.int8
    errors = [json.loads(line) for line in (tmp_path / "v.errors.jsonl").read_text().splitlines()]
    assert [error["position"] for error in errors if error["code"] == "stopped"] == [0, 1, 4, 5, 8, 9, 10, 11]


@pytest.mark.parametrize("name", ["v.npy", "v.parquet", "v.jsonl"])
def test_every_format_takes_a_job_that_was_hardly_begun(name: str, broker: Broker, tmp_path: Path) -> None:
    job = Job(new_job(broker, 3), broker)
    job.stop()
    fetch(job, tmp_path / name)
    if name == "v.npy":
        assert np.load(tmp_path / name).shape == (6, 0)
    else:
        rows = pq.read_table(tmp_path / name).num_rows if name == "v.parquet" else (tmp_path / name).stat().st_size
        assert rows == 0
