"""Fields of the corpus that come out beside the vectors: in every format, and whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis as redis_py

from embedctl import CorpusChanged, Job, JobState, SettingsError, aenqueue_embeddings, enqueue_embeddings
from embedctl.broker import Broker
from embedctl_config import keys, wire
from embedctl_config.errors import InputError
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

KEEP = ("title", "n", "of")
ITEMS: list[dict[str, Any]] = [
    {"text": f"text {i}", "id": i, "title": f"Titel {i} ü\u2028", "n": i * 0.5, "of": {"tags": [i, None]}}
    for i in range(40)
]
del ITEMS[7]["title"]


def kept_of(items: list[dict[str, Any]], keep: tuple[str, ...] = KEEP) -> list[dict[str, Any]]:
    return [{name: item.get(name) for name in keep} for item in items]


def found_in(job: Job) -> list[Mapping[str, Any]]:
    """The kept fields of all records, in order."""
    return [fields for chunk in job.iter_results(timeout=60) for fields in chunk.kept or []]


def write_corpus(folder: Path, items: list[dict[str, Any]] = ITEMS) -> str:
    (folder / "c.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return "c.jsonl"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.in_redis
def test_kept_fields_come_out_of_the_library(settings: Settings, start_worker: StartWorker) -> None:
    job = enqueue_embeddings(ITEMS, keep=KEEP, chunk_size=9, settings=settings)
    start_worker()
    assert found_in(job) == kept_of(ITEMS)
    assert job.status().options["keep"] == list(KEEP)
    np.testing.assert_array_equal(job.vectors(), reference([item["text"] for item in ITEMS]))


@pytest.mark.in_redis
def test_a_job_that_keeps_nothing_is_as_it_was(settings: Settings, start_worker: StartWorker) -> None:
    job = enqueue_embeddings(ITEMS, settings=settings)
    start_worker()
    assert [chunk.kept for chunk in job.iter_results(timeout=60)] == [None]
    assert "keep" not in job.status().options


def test_kept_fields_come_out_of_the_async_library(settings: Settings, start_worker: StartWorker) -> None:
    async def found() -> list[Any]:
        job = await aenqueue_embeddings(ITEMS, keep=KEEP, settings=settings)
        return [chunk.kept async for chunk in job.iter_results(timeout=60)]

    start_worker()
    assert asyncio.run(found()) == [kept_of(ITEMS)]


def test_jsonl_and_parquet_hold_them_and_npy_says_that_it_does_not(
    embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker()
    items = [*ITEMS, {"text": "", "title": "no vector"}]
    done = embedctl("submit", write_corpus(short_folder, items), "--keep", "title,n,of,text", "-o", "out.jsonl")
    assert done.returncode == 3, done.stderr
    rows = lines_of(short_folder / "out.jsonl")
    assert [{name: row[name] for name in (*KEEP, "text")} for row in rows] == kept_of(items, (*KEEP, "text"))
    assert list(rows[0]) == ["position", "id", "title", "n", "of", "text", "embedding"]
    assert rows[40]["error"]["code"] == "empty"

    job = done.stdout.strip()
    assert embedctl("fetch", job, "-o", "out.parquet").returncode == 3
    table = pq.read_table(short_folder / "out.parquet")
    assert {name: table.schema.field(name).type for name in KEEP} == {
        "title": pa.string(),
        "n": pa.float64(),
        "of": pa.string(),
    }
    assert table["title"].to_pylist() == [item.get("title") for item in items]
    assert table["n"].to_pylist() == [item.get("n") for item in items]
    assert [json.loads(cell or "null") for cell in table["of"].to_pylist()] == [item.get("of") for item in items]

    fetched = embedctl("fetch", job, "-o", "out.npy")
    assert "Not in out.npy: the kept fields (title, n, of, text). Fetch into a .jsonl or .parquet" in fetched.stderr
    assert np.load(short_folder / "out.npy").shape == (41, 16)


@pytest.mark.parametrize("command", ["submit", "run"])
def test_an_output_without_room_for_them_is_refused_at_once(
    command: str, embedctl: RunEmbedctl, raw: redis_py.Redis, short_folder: Path
) -> None:
    done = embedctl(command, write_corpus(short_folder), "--keep", "title", "-o", "out.npy")
    assert done.returncode == 2
    assert "can't hold the kept fields (title): name the output .jsonl or .parquet" in done.stderr
    assert not list(raw.scan_iter("embed:job:*"))


def test_a_parquet_file_begins_again_when_a_later_value_has_another_type(
    settings: Settings, embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker()
    numbers = [None, 1, 2**60, 2.5, "text", True]
    items = [{"text": f"text {i}", "n": number, "m": i % 4} for i, number in enumerate(numbers)]
    job = enqueue_embeddings(items, keep=("n", "m"), chunk_size=1, settings=settings)
    assert embedctl("fetch", job.id, "-o", "out.parquet").returncode == 0
    table = pq.read_table(short_folder / "out.parquet")
    assert table["n"].to_pylist() == [None, "1", str(2**60), "2.5", "text", "true"]
    assert table["m"].to_pylist() == [0, 1, 2, 3, 0, 1]
    assert table["position"].to_pylist() == list(range(6))
    assert not list(short_folder.glob(".out*"))


def test_an_empty_job_has_the_columns_too(settings: Settings, embedctl: RunEmbedctl, short_folder: Path) -> None:
    job = enqueue_embeddings([], keep=("title",), settings=settings)
    assert embedctl("fetch", job.id, "-o", "out.parquet").returncode == 0
    assert "title" in pq.read_table(short_folder / "out.parquet").column_names


def test_what_is_retried_keeps_its_fields(settings: Settings, start_worker: StartWorker) -> None:
    worker = start_worker("poison")
    texts = ["one", "fail-encoder", "three", "fail-encoder too", "five"]
    items = [{"text": text, "title": f"t{i}"} for i, text in enumerate(texts)]
    job = enqueue_embeddings(items, keep=("title",), chunk_size=2, hardware="poison", settings=settings)
    for _ in range(2):
        assert job.wait(timeout=60).failed == 2
        assert found_in(job) == kept_of(items, ("title",))
        assert job.retry_failed() == 2
    worker.kill()
    start_worker("poison")
    assert job.wait(timeout=60).failed == 2
    assert found_in(job) == kept_of(items, ("title",))


def test_a_retry_that_succeeds_keeps_the_fields_of_its_records(settings: Settings, start_worker: StartWorker) -> None:
    small = start_worker("small")  # too little memory for a text of more than 100 tokens
    items = [{"text": "word " * size, "title": f"t{size}"} for size in (3, 150, 4)]
    job = enqueue_embeddings(items, keep=("title",), hardware="small", settings=settings)
    assert job.wait(timeout=60).failed == 1
    small.kill()
    assert job.retry_failed() == 1
    config = small.log_file.parent / "embedctl.toml"
    config.write_text(config.read_text().replace("memory_tokens = 100", "memory_tokens = 1000"))
    start_worker("small")
    assert job.wait(timeout=60).state is JobState.COMPLETED
    assert found_in(job) == kept_of(items, ("title",))


def test_what_killed_a_worker_keeps_its_fields(settings: Settings, start_worker: StartWorker) -> None:
    """In careful mode, by workers that doubt each other, and beside the failed records."""
    items = [{"text": text, "title": text.upper()} for text in ("one", "crash-encoder", "three", "fail-tokenizer")]
    job = enqueue_embeddings(items, keep=("title",), hardware="poison", settings=settings)
    for _ in range(3):
        start_worker("poison", wait=False)
    status = job.wait(timeout=60)
    assert (status.done, status.failed) == (2, 2)
    assert status.deaths >= 1
    assert found_in(job) == kept_of(items, ("title",))


def test_another_value_is_another_corpus(settings: Settings, start_worker: StartWorker) -> None:
    def submit(items: list[dict[str, Any]], *keep: str) -> Job:
        return enqueue_embeddings(items, keep=keep, chunk_size=8, idempotency_key="key", settings=settings)

    job = submit(ITEMS, "title", "n")
    assert submit(ITEMS, "title", "n").id == job.id
    for encoded in (False, True):  # compared with the input, then with the result
        changed = [*ITEMS[:21], {**ITEMS[21], "n": "other"}, *ITEMS[22:]]
        with pytest.raises(CorpusChanged, match="record 21 is not the one"):
            submit(changed, "title", "n")
        for keep in ((), ("title",), ("n", "title")):
            with pytest.raises(CorpusChanged, match=r"other options: keep was \['title', 'n'\] and is"):
                submit(ITEMS, *keep)
        if not encoded:
            start_worker()
            job.wait(timeout=60)
    enqueue_embeddings(ITEMS, idempotency_key="without", settings=settings)
    with pytest.raises(CorpusChanged, match=r"keep was None and is \['title'\]"):
        enqueue_embeddings(ITEMS, keep=["title"], idempotency_key="without", settings=settings)


def test_a_submission_is_resumed_with_the_same_fields(
    broker: Broker, settings: Settings, embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path
) -> None:
    def some() -> Any:
        yield from ITEMS[:20]
        raise InputError("the rest is not there")

    with pytest.raises(InputError):
        enqueue_embeddings(some(), keep=KEEP, chunk_size=5, idempotency_key="key", settings=settings)
    (job_id,) = broker.jobs.newest_ids(2)
    corpus = write_corpus(short_folder)
    refused = embedctl("submit", corpus, "--resume", job_id)
    assert refused.returncode == 2
    assert "keep was ['title', 'n', 'of'] and is None" in refused.stderr
    done = embedctl("submit", corpus, "--resume", job_id, "--keep", ",".join(KEEP))
    assert done.returncode == 0, done.stderr
    start_worker()
    assert found_in(Job.get(job_id, settings)) == kept_of(ITEMS)


@pytest.mark.parametrize("lost", [keys.chunk_input, keys.chunk_result])
def test_a_chunk_that_redis_lost_is_repaired_with_its_fields(
    lost: Any, raw: redis_py.Redis, settings: Settings, start_worker: StartWorker
) -> None:
    def submit() -> Job:
        return enqueue_embeddings(ITEMS, keep=KEEP, chunk_size=10, idempotency_key="key", settings=settings)

    job = submit()
    if lost is keys.chunk_result:
        start_worker()
        job.wait(timeout=60)
    assert raw.delete(lost(job.id, 2))
    assert submit().id == job.id
    if lost is keys.chunk_input:
        start_worker()
    assert job.wait(timeout=60).state is JobState.COMPLETED
    assert found_in(job) == kept_of(ITEMS)


@pytest.mark.in_redis
def test_a_result_of_many_parts_has_its_fields(
    settings: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    items = [{"text": f"text {i}", "body": f"{i} " + "x" * 60_000} for i in range(60)]
    job = enqueue_embeddings(items, keep=("body",), settings=settings.replace(chunk_bytes=8 * 2**20))
    assert job.status().waiting_bytes > 60 * 60_000
    start_worker()
    job.wait(timeout=60)
    assert raw.strlen(keys.chunk_result(job.id, 0)) > 3 * 2**20
    assert found_in(job) == kept_of(items, ("body",))


def test_kept_bytes_count_against_a_chunk(settings: Settings) -> None:
    items = [{"text": "t", "body": "x" * 1000} for _ in range(10)]
    job = enqueue_embeddings(items, keep=("body",), settings=settings.replace(chunk_bytes=3100))
    assert job.status().chunks == 4


def test_a_damaged_section_is_treated_as_damaged_ids_are(
    broker: Broker, raw: redis_py.Redis, settings: Settings, start_worker: StartWorker
) -> None:
    def submit() -> Job:
        return enqueue_embeddings(ITEMS[:3], keep=("n",), idempotency_key="key", settings=settings)

    job = submit()
    name = keys.chunk_input(job.id, 0)
    chunk = wire.decode_input(broker.jobs.input(job.id, 0) or b"")
    damaged = wire.ChunkInput(chunk.first, chunk.kinds, chunk.texts, chunk.ids, kept=[b"[]"] * 3)
    raw.set(name, wire.encode_input(damaged), keepttl=True)
    start_worker()
    eventually(lambda: not raw.exists(name))
    assert "kept fields that are not a JSON object" in (job.status().trouble or "")
    submit()
    assert job.wait(timeout=60).done == 3
    assert found_in(job) == kept_of(ITEMS[:3], ("n",))


def test_too_many_fields_are_refused_before_anything_is_queued(settings: Settings, raw: redis_py.Redis) -> None:
    with pytest.raises(SettingsError, match="33 fields, and the maximum is 32"):
        enqueue_embeddings(ITEMS, keep=[f"f{i}" for i in range(33)], settings=settings)
    assert not list(raw.scan_iter("embed:job:*"))


def test_a_dry_run_counts_kept_bytes(embedctl: RunEmbedctl, short_folder: Path) -> None:
    done = embedctl("submit", write_corpus(short_folder), "--keep", "title", "--dry-run")
    assert "bytes beside the vectors" in done.stdout
