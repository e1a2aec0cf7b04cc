"""The failed records of a job are listed without its vectors being read, and none is left out for it."""

from __future__ import annotations

import dataclasses

import pytest
from redis import Redis

from embedctl.broker import Broker
from embedctl.job import Job
from embedctl.results import FailedRecord
from embedctl_config import keys, wire
from embedctl_config.errors import JobLost, WireTruncated
from embedctl_config.wire import ChunkInput, ChunkResult, ErrorCode, RecordError
from tests.support.store import MINE, new_job, row, spec, work

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


def test_a_head_says_what_the_whole_says_but_for_the_vectors() -> None:
    whole = ChunkResult(
        first=3,
        rows=2,
        dim=5,
        digest=bytes(16),
        fingerprint=MINE,
        precision="int8",
        backend="onnx",
        vectors=bytes(40),
        checksums=[1, 2],
        ids=["a", None],
        positions=[3, 9],
        errors=[RecordError(1, ErrorCode.EMPTY, "x")],
        truncations=[wire.Truncation(0, 2, 3)],
        bounds="min_cosine 0.9",
    )
    data = wire.encode_result(whole)
    assert wire.decode_result_head(data) == dataclasses.replace(whole, dim=0, vectors=b"")
    ends = []
    for size in range(len(data) + 1):
        try:
            ends.append(wire.decode_result_head(data[:size]))
        except WireTruncated:
            assert not ends, "what was enough is enough with more"
    assert ends
    assert all(each == ends[0] for each in ends)
