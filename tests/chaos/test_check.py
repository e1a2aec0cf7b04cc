"""A harness that can't fail proves nothing: each kind of damage is done by hand, and has to be seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl import Job, JobNotFound, enqueue_embeddings
from embedctl_config import keys, wire
from embedctl_config.wire import ChunkResult
from tests.chaos.check import Verdict, check_job, keys_without_ttl, unknown_jobs
from tests.chaos.jobs import DummyWorkload, Plan
from tests.chaos.options import Options
from tests.chaos.stack import Stack

POISONED = 5
PLAN = Plan(
    index=0,
    key="tampered with",
    kind="poison",
    model="dummy",
    hardware="quick",
    ttl_s=100,
    records=40,
    chunk_size=10,
    ids="field",
    poison={POISONED: "fail-encoder"},
)


@dataclasses.dataclass
class Checked:
    """An ended job that a test may damage."""

    stack: Stack
    workload: DummyWorkload
    job: Job

    def verdict(self) -> Verdict:
        return check_job(self.job, self.stack.broker, self.stack.raw, PLAN, self.workload.expected(PLAN))

    def rewrite(self, change: Callable[[ChunkResult], dict[str, Any]]) -> None:
        """Store the first chunk's result with something changed."""
        key = keys.chunk_result(self.job.id, 0)
        result = wire.decode_result(self.stack.raw.get(key))
        self.stack.raw.set(key, wire.encode_result(dataclasses.replace(result, **change(result))), keepttl=True)


@pytest.fixture
def checked(short_folder: Path) -> Iterator[Checked]:
    options = Options(minutes=1, seed=1, workers=2, lease_s=1.0)
    stack = Stack(options, short_folder)
    workload = DummyWorkload(options)
    try:
        stack.start()
        job = enqueue_embeddings(
            workload.items(PLAN),
            idempotency_key=PLAN.key,
            chunk_size=PLAN.chunk_size,
            ttl=PLAN.ttl_s,
            settings=stack.settings,
        )
        job.wait(timeout=60)
        yield Checked(stack, workload, job)
    finally:
        stack.close()


def other_vectors(result: ChunkResult) -> dict[str, Any]:
    vectors = np.frombuffer(result.vectors, "<f4").copy()
    vectors[0] += 1e-3
    return {"vectors": vectors.tobytes()}


def no_errors(_: ChunkResult) -> dict[str, Any]:
    return {"errors": []}


def another_row_failed(result: ChunkResult) -> dict[str, Any]:
    return {"errors": [dataclasses.replace(result.errors[0], row=2)]}


def other_positions(result: ChunkResult) -> dict[str, Any]:
    return {"positions": [1, *range(1, result.rows)]}


def test_every_damage_is_seen(checked: Checked) -> None:
    raw, job_id = checked.stack.raw, checked.job.id
    assert checked.verdict() == Verdict()
    assert keys_without_ttl(raw) == []
    assert unknown_jobs(raw, {job_id}) == []
    sound = raw.get(keys.chunk_result(job_id, 0))

    checked.rewrite(other_vectors)
    assert checked.verdict().wrong_vectors == 1
    assert 0.9e-3 < checked.verdict().difference < 1.1e-3
    raw.set(keys.chunk_result(job_id, 0), sound, keepttl=True)
    checked.rewrite(no_errors)
    assert checked.verdict().lost == 1
    assert checked.verdict().wrong_errors == 1
    raw.set(keys.chunk_result(job_id, 0), sound, keepttl=True)
    checked.rewrite(another_row_failed)
    assert (checked.verdict().lost, checked.verdict().doubled, checked.verdict().wrong_errors) == (1, 1, 2)
    raw.set(keys.chunk_result(job_id, 0), sound, keepttl=True)
    checked.rewrite(other_positions)
    assert (checked.verdict().lost, checked.verdict().doubled) == (1, 1)
    raw.set(keys.chunk_result(job_id, 0), sound, keepttl=True)

    raw.hincrby(keys.job(job_id), "done", 1)
    assert checked.verdict().other == 1
    raw.hincrby(keys.job(job_id), "done", -1)
    raw.zadd(keys.due(job_id), {"1": 1})
    assert checked.verdict().other == 1
    raw.delete(keys.due(job_id))
    assert checked.verdict() == Verdict()

    raw.persist(keys.chunk_result(job_id, 0))
    assert keys_without_ttl(raw) == [keys.chunk_result(job_id, 0)]
    assert unknown_jobs(raw, set()) == [job_id]
    raw.delete(keys.chunk_result(job_id, 0))
    with pytest.raises(JobNotFound):
        checked.verdict()
