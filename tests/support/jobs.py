"""Jobs in tests: their expected vectors, and their data in Redis."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import redis as redis_py

from embedctl import Job, JobState
from embedctl.queueing.broker import Broker
from embedctl.store import JobStatus
from embedctl.store.status import COUNTS, parse_status
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config import keys
from embedctl_config.outputs import Output, asked_by
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.store import active_jobs
from tests.support.waiting import eventually


def reference(texts: Sequence[str], prompt: str | None = None, seed: int = 0) -> Vectors:
    """The unit vectors of the dummy backend: float32, (texts, 16)."""
    backend = DummyBackend(dim=16, seed=seed)
    return backend.finish(backend.forward(backend.tokenize(texts, prompt), np.arange(len(texts))), normalize=True)


def other_vectors(job: Job) -> dict[int, dict[str, Any]]:
    """By position, the sparse vector (index → weight) and the multi-vector of each record, if the job asks for them."""
    asked, found = asked_by(job.status().options), dict[int, dict[str, Any]]()
    for record in job.sparse() if Output.SPARSE in asked else ():
        weights = zip(record.indices.tolist(), record.weights.tolist(), strict=True)
        found.setdefault(record.position, {})["sparse"] = dict(weights)
    for each in job.multi() if Output.MULTI in asked else ():
        found.setdefault(each.position, {})["multi"] = each.vectors
    return found


def assert_same_vectors(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Those of a row are, among others, those that :func:`other_vectors` gives of a record."""
    for name, vectors in expected.items():
        if name == "multi":
            np.testing.assert_allclose(found[name], vectors, rtol=0, atol=1e-6)
        else:
            assert found[name] == pytest.approx(vectors)


def assert_same_rows(found: SparseVectors | MultiVectors | None, expected: SparseVectors | MultiVectors) -> None:
    """The same vectors, each number of them."""
    assert found is not None
    assert found.width == expected.width
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_encoded(job: Job, texts: Sequence[str]) -> None:
    """The job is completed soon: every record has its vector, and each is counted once.

    This does not use `wait`, which also reaps: only workers reap here.
    """
    eventually(lambda: job.status().state.ended)
    status = job.status()
    assert (status.state, status.records, status.done) == (JobState.COMPLETED, len(texts), len(texts))
    assert (status.failed, status.chunks_done, status.waiting_bytes) == (0, status.chunks, 0)
    assert (job.errors(), job.suspects()) == ([], [])
    assert [at for chunk in job.iter_results() for at in chunk.positions] == list(range(len(texts)))
    np.testing.assert_array_equal(job.vectors(), reference(texts))


def status_of(job_id: str, now_ms: int, *, producer_alive: bool = True, **facts: object) -> JobStatus:
    """What the store says of a running job of 1,000 records that began ten seconds ago, with these facts instead."""
    plain: dict[str, object] = {
        **dict.fromkeys(COUNTS, 0),
        "state": "running",
        "model": "mini",
        "hardware": "cpu",
        "precision": "fp32",
        "options": "{}",
        "created_ms": now_ms - 10_000,
        "started_ms": now_ms - 10_000,
        "progressed_ms": now_ms,
        "ttl_ms": 1_000_000,
        "sealed": 1,
        "records": 1_000,
    }
    texts = {name: str(value) for name, value in {**plain, **facts}.items()}
    return parse_status(job_id, texts, 1_000_000, producer_alive)


def active_job_id(broker: Broker) -> str:
    """The id of the one job that is under way."""
    (job_id,) = active_jobs(broker)
    return job_id


def last_event(broker: Broker, job_id: str, after: str, timeout_s: float) -> str:
    """Wait until something happens to a job, or the time is over. The id of its last event, or `after`."""
    events = broker.jobs.events(job_id, after, timeout_s)
    return events[-1].id if events else after


def owners(raw: redis_py.Redis, job: Job) -> dict[int, list[str]]:
    """Leased chunk → the words of its owner; see :data:`keys.owners`."""
    held = cast(Mapping[bytes, bytes], raw.hgetall(keys.owners(job.id)))  # this client decodes nothing
    return {int(chunk): owner.decode().split(" ") for chunk, owner in held.items()}


def nobody_reads_jobs(raw: redis_py.Redis) -> bool:
    """Whether nobody waits for a job any more: whoever waits looks at it each second."""
    before = job_reads(raw)
    time.sleep(1.5)  # a busy machine may hide one that waits
    return job_reads(raw) == before


def job_reads(raw: redis_py.Redis) -> int:
    """How often clients have read a job's hash."""
    return int(raw.info("commandstats")["cmdstat_hgetall"]["calls"])
