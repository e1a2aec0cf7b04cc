"""`embedctl.testing` answers as workers do, without Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from embedctl import (
    BrokerFull,
    BrokerUnavailable,
    CorpusChanged,
    Job,
    JobNotFound,
    JobState,
    WaitTimeout,
    aenqueue_embeddings,
    enqueue_embeddings,
)
from embedctl.testing import answering


def test_vectors_depend_on_text_and_prompt_alone() -> None:
    with answering(dimensions=384):
        job = enqueue_embeddings(["a", "b", "a"], ids=["x", None, "z"])
        status, vectors = job.wait(), job.vectors()
        assert enqueue_embeddings(["a"], prompt="q: ").vectors()[0] @ vectors[0] < 0.5
        assert asyncio.run(_vectors_of("b")) == pytest.approx(vectors[1])
    assert (status.state, status.records, status.dim) == (JobState.COMPLETED, 3, 384)
    assert vectors[0] == pytest.approx(vectors[2])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0)


async def _vectors_of(text: str) -> np.ndarray:
    job = await aenqueue_embeddings([text])
    vectors: np.ndarray = (await job.vectors())[0]
    return vectors


def test_records_fail_as_with_workers_or_to_order() -> None:
    with answering(refuse=lambda text: "not this one" if "bad" in text else None):
        job = enqueue_embeddings(
            [{"text": "fine", "url": "u"}, {"text": "", "url": "v"}, {"text": "bad"}], keep=["url"]
        )
        (chunk,) = job.results()
        assert [(each.position, each.code, each.message) for each in job.errors()] == [
            (1, "empty", "the text is empty"),
            (2, "encode_error", "not this one"),
        ]
    assert chunk.kept == [{"url": "u"}, {"url": "v"}, {"url": None}]
    assert np.isnan(chunk.vectors[1:]).all()


def test_a_model_of_the_caller_makes_the_vectors(tmp_path: Path) -> None:
    with answering(encode=lambda texts: [[len(text), 3.0, 4.0] for text in texts]):
        job = enqueue_embeddings(["abc"], prompt="p: ", dimensions=2, normalize=False)
        assert job.vectors().tolist() == [[6.0, 3.0]]
        job.deliver(str(tmp_path / "vectors.npy"))
        assert enqueue_embeddings(["abc"]).vectors()[0] == pytest.approx(np.array([3, 3, 4]) / 34**0.5)
    assert np.load(tmp_path / "vectors.npy").tolist() == [[6.0, 3.0]]


def test_keys_find_their_jobs_until_they_are_discarded() -> None:
    with answering():
        job = enqueue_embeddings(map(str, range(1300)), idempotency_key="k")
        assert enqueue_embeddings(map(str, range(1300)), idempotency_key="k").id == job.id
        assert [len(chunk.positions) for chunk in job.results()] == [512, 512, 276]
        with pytest.raises(CorpusChanged, match="record 1300"):
            enqueue_embeddings(map(str, range(1301)), idempotency_key="k")
        job.discard()
        with pytest.raises(JobNotFound):
            Job.get(job.id).status()
        assert enqueue_embeddings(["a"], idempotency_key="k").id != job.id


def test_a_job_that_does_not_finish() -> None:
    with answering(finishes=False):
        job = enqueue_embeddings(["a"])
        with pytest.raises(WaitTimeout, match="0 of 1 records are done"):
            job.wait(timeout=0.01)
        assert job.cancel().state is JobState.CANCELLED


def test_a_redis_that_is_away_or_full() -> None:
    with answering(failure=BrokerUnavailable("away")), pytest.raises(BrokerUnavailable, match="away"):
        enqueue_embeddings(["a"])
    with answering(failure=BrokerFull("full")), pytest.raises(WaitTimeout, match="full"):
        enqueue_embeddings(["a"], timeout=0.01)
