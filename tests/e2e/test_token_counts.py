"""The tokens of each record come back with its vector, whatever happens on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis as redis_py

from embedctl import CorpusChanged, Job, JobState, SettingsError, aenqueue_embeddings, enqueue_embeddings
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.workers import StartWorker

TEXTS = [*("word " * (1 + i % 5) for i in range(20)), "", "word", "w " * 300]
#: The dummy takes 256 tokens.
COUNTS = [*(1 + i % 5 for i in range(20)), 0, 1, 256]


def counted(job: Job) -> list[int]:
    """The tokens of all records, in order."""
    return [
        int(count)
        for chunk in job.iter_results(timeout=60)
        for count in (chunk.tokens if chunk.tokens is not None else [])
    ]


@pytest.mark.in_redis
def test_they_come_out_of_the_library_if_asked_for(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()
    start_worker("half")
    job = enqueue_embeddings(TEXTS, count_tokens=True, chunk_size=7, settings=settings)
    assert counted(job) == COUNTS
    assert job.status().options["count_tokens"] is True
    half = enqueue_embeddings(TEXTS, count_tokens=True, hardware="half", settings=settings)
    assert counted(half) == COUNTS
    whole = enqueue_embeddings(TEXTS, count_tokens=True, truncation="mean", settings=settings)
    assert counted(whole) == [*COUNTS[:-1], 300]
    plain = enqueue_embeddings(TEXTS, settings=settings)
    assert counted(plain) == []
    assert "count_tokens" not in plain.status().options


def test_they_come_out_of_the_async_library(settings: Settings, start_worker: StartWorker) -> None:
    async def found() -> list[Any]:
        job = await aenqueue_embeddings(TEXTS, count_tokens=True, settings=settings)
        return [chunk.tokens.tolist() async for chunk in job.iter_results(timeout=60) if chunk.tokens is not None]

    start_worker()
    assert asyncio.run(found()) == [COUNTS]


def test_a_retry_that_succeeds_counts_its_records(settings: Settings, start_worker: StartWorker) -> None:
    small = start_worker("small")  # too little memory for a text of more than 100 tokens
    texts = ["word " * size for size in (3, 150, 4)]
    job = enqueue_embeddings(texts, count_tokens=True, hardware="small", settings=settings)
    assert job.wait(timeout=60).failed == 1
    assert counted(job) == [3, 0, 4]
    small.kill()
    assert job.retry_failed() == 1
    config = small.log_file.parent / "embedctl.toml"
    config.write_text(config.read_text().replace("memory_tokens = 100", "memory_tokens = 1000"))
    start_worker("small")
    assert job.wait(timeout=60).state is JobState.COMPLETED
    assert counted(job) == [3, 150, 4]


def test_what_killed_a_worker_counts_for_nothing(settings: Settings, start_worker: StartWorker) -> None:
    texts = ["one", "crash-encoder", "three words here", "fail-tokenizer"]
    job = enqueue_embeddings(texts, count_tokens=True, hardware="poison", settings=settings)
    for _ in range(3):
        start_worker("poison", wait=False)
    assert job.wait(timeout=60).deaths >= 1
    assert counted(job) == [1, 0, 3, 0]


def test_a_result_that_redis_lost_is_repaired_with_them(
    raw: redis_py.Redis, settings: Settings, start_worker: StartWorker
) -> None:
    def submit(*, count: bool = True) -> Job:
        return enqueue_embeddings(TEXTS, count_tokens=count, chunk_size=5, idempotency_key="key", settings=settings)

    start_worker()
    job = submit()
    job.wait(timeout=60)
    assert raw.delete(keys.chunk_result(job.id, 2))
    assert submit().id == job.id
    assert counted(job) == COUNTS
    with pytest.raises(CorpusChanged, match="count_tokens was True and is None"):
        submit(count=False)


def test_a_kept_field_is_not_named_like_them(settings: Settings) -> None:
    items = [{"text": "a", "tokens": 1}]
    with pytest.raises(SettingsError, match=r"'tokens' is what output files call the number of tokens"):
        enqueue_embeddings(items, keep=["tokens"], count_tokens=True, settings=settings)
    assert enqueue_embeddings(items, keep=["tokens"], settings=settings).status().options["keep"] == ["tokens"]
