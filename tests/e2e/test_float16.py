"""Jobs in fp16: their vectors are stored in float16, and everybody reads float32."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis as redis_py

from embedctl import CorpusChanged, Job, JobState, aenqueue_embeddings, enqueue_embeddings
from embedctl.results import Vectors
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl
from tests.support.workers import StartWorker

TEXTS = [f"text {i}" for i in range(40)]
FLOAT32, FLOAT16 = 1, 2


def in_float16(texts: Sequence[str] = TEXTS) -> Vectors:
    """The texts' vectors, rounded."""
    return reference(texts).astype(np.float16).astype(np.float32)


def stored_as(raw: redis_py.Redis, job: Job) -> list[int]:
    """The type of each chunk's vectors."""
    return [ord(raw.getrange(keys.chunk_result(job.id, chunk), 40, 40)) for chunk in range(job.status().chunks)]


def replace_in(config: Path, before: str, after: str) -> None:
    assert before in config.read_text()
    config.write_text(config.read_text().replace(before, after))


def test_the_vectors_take_half_the_room_and_come_out_as_float32(
    raw: redis_py.Redis, settings: Settings, start_worker: StartWorker
) -> None:
    start_worker("half")
    start_worker()
    texts = [*TEXTS, "", "last"]
    half, whole = (
        enqueue_embeddings(texts, hardware=name, chunk_size=9, settings=settings) for name in ("half", "dummy")
    )
    assert (half.wait(timeout=60).done, whole.wait(timeout=60).done) == (41, 41)
    assert (set(stored_as(raw, half)), set(stored_as(raw, whole))) == ({FLOAT16}, {FLOAT32})
    sizes = [raw.strlen(keys.chunk_result(job.id, 0)) for job in (half, whole)]
    assert sizes[1] - sizes[0] == 9 * 16 * 2
    expected = np.concatenate([in_float16(), np.full((1, 16), np.nan, np.float32), in_float16(["last"])])
    vectors = half.vectors()
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, expected)
    chunks = list(half.iter_results())
    assert {chunk.vectors.dtype for chunk in chunks} == {np.dtype(np.float32)}
    assert {chunk.precision for chunk in chunks} == {"fp16"}
    np.testing.assert_array_equal(np.concatenate([chunk.vectors for chunk in chunks]), expected)
    np.testing.assert_allclose(vectors[:40], reference(TEXTS), rtol=0, atol=2**-12)


def test_the_async_library_reads_them(settings: Settings, start_worker: StartWorker) -> None:
    async def found() -> Any:
        job = await aenqueue_embeddings(TEXTS, hardware="half", settings=settings)
        await job.wait(timeout=60)
        return await job.vectors()

    start_worker("half")
    np.testing.assert_array_equal(asyncio.run(found()), in_float16())


def test_every_file_holds_float32(embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path) -> None:
    start_worker("half")
    (short_folder / "c.txt").write_text("\n".join(TEXTS) + "\n")
    done = embedctl("submit", "c.txt", "--class", "half", "--chunk-size", "7", "-o", "out.npy")
    assert done.returncode == 0, done.stderr
    found = np.load(short_folder / "out.npy")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, in_float16())

    job = done.stdout.strip()
    assert embedctl("fetch", job, "-o", "out.parquet").returncode == 0
    column = pq.read_table(short_folder / "out.parquet")["embedding"]
    assert column.type == pa.list_(pa.float32(), 16)
    np.testing.assert_array_equal(np.array(column.to_pylist(), np.float32), in_float16())
    printed = embedctl("fetch", job, "-o", "-")
    rows = [json.loads(line)["embedding"] for line in printed.stdout.splitlines()]
    np.testing.assert_array_equal(np.array(rows, np.float32), in_float16())


def test_a_class_with_a_bound_on_each_component_stores_float32_even_where_it_repairs_a_job(
    raw: redis_py.Redis, settings: Settings, start_worker: StartWorker
) -> None:
    first = start_worker("half")
    job = enqueue_embeddings(TEXTS[:20], hardware="half", chunk_size=20, idempotency_key="k", settings=settings)
    job.wait(timeout=60)
    config = first.log_file.parent / "embedctl.toml"
    replace_in(config, 'precision = "fp16"', 'precision = "fp16"\nmax_abs_error = 0.0001')
    first.stop()
    start_worker("half")
    other = enqueue_embeddings(TEXTS[20:], hardware="half", chunk_size=20, settings=settings)
    other.wait(timeout=60)
    assert (stored_as(raw, job), stored_as(raw, other)) == ([FLOAT16], [FLOAT32])
    np.testing.assert_array_equal(job.vectors(), in_float16(TEXTS[:20]))
    np.testing.assert_array_equal(other.vectors(), reference(TEXTS[20:]))

    raw.delete(keys.chunk_result(job.id, 0))  # Redis lost it, and the corpus repairs it at the other worker
    again = enqueue_embeddings(TEXTS[:20], hardware="half", chunk_size=20, idempotency_key="k", settings=settings)
    assert again.wait(timeout=60).state is JobState.COMPLETED
    assert stored_as(raw, job) == [FLOAT32]
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS[:20]))


def test_retried_records_come_out_among_the_others(
    raw: redis_py.Redis, settings: Settings, start_worker: StartWorker, environment: dict[str, str]
) -> None:
    config = Path(environment["EMBEDCTL_CONFIG"])
    half = 'precision = "fp16"\noptions = {dim = 16}'
    replace_in(config, half, 'precision = "fp16"\noptions = {dim = 16, memory_tokens = 100}')
    small = start_worker("half")
    texts = ["word " * size for size in (3, 150, 4)]
    job = enqueue_embeddings(texts, hardware="half", settings=settings)
    assert job.wait(timeout=60).failed == 1
    small.kill()
    assert job.retry_failed() == 1
    replace_in(config, "dim = 16, memory_tokens = 100}\n\n[classes.slow]", "dim = 16}\n\n[classes.slow]")
    start_worker("half")
    assert job.wait(timeout=60).state is JobState.COMPLETED
    assert stored_as(raw, job) == [FLOAT16, FLOAT16]
    np.testing.assert_array_equal(job.vectors(), in_float16(texts))


def test_a_corpus_that_changed_is_noticed(settings: Settings, start_worker: StartWorker) -> None:
    """The checksums of its records come from the result, once a chunk is encoded."""
    start_worker("half")
    job = enqueue_embeddings(TEXTS, hardware="half", idempotency_key="k", settings=settings)
    job.wait(timeout=60)
    changed = [*TEXTS[:7], "other", *TEXTS[8:]]
    with pytest.raises(CorpusChanged, match="record 7 is not the one"):
        enqueue_embeddings(changed, hardware="half", idempotency_key="k", settings=settings)


def test_an_estimate_knows_what_redis_will_hold(
    embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path
) -> None:
    (short_folder / "c.txt").write_text("one\ntwo\n")
    start_worker("half")
    done = embedctl("submit", "c.txt", "--class", "half", "--dry-run", "--json")
    assert json.loads(done.stdout)["vector_bytes"] == 2 * 16 * 2, done.stderr
