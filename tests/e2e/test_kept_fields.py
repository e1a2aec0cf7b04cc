"""Kept fields of the corpus, and counts of tokens, come out beside the vectors, whatever happens on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedctl import Job, JobState, enqueue_embeddings
from tests.support.here import Here
from tests.support.jobs import reference

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


def counted(job: Job) -> list[int]:
    """The tokens of all records, in order."""
    return [
        int(count)
        for chunk in job.iter_results(timeout=60)
        for count in (chunk.tokens if chunk.tokens is not None else [])
    ]


def write_corpus(folder: Path, items: list[dict[str, Any]]) -> str:
    (folder / "c.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return "c.jsonl"


@pytest.mark.in_redis
def test_they_come_out_of_the_library_if_asked_for(here: Here) -> None:
    here.start_worker()
    here.start_worker("half")
    job = enqueue_embeddings(ITEMS, keep=KEEP, count_tokens=True, chunk_size=9, settings=here.settings)
    assert found_in(job) == kept_of(ITEMS)
    assert counted(job) == [2] * 40
    assert (job.status().options["keep"], job.status().options["count_tokens"]) == (list(KEEP), True)
    np.testing.assert_array_equal(job.vectors(), reference([item["text"] for item in ITEMS]))
    texts = ["word " * 3, "", "w " * 300]
    half = enqueue_embeddings(texts, count_tokens=True, hardware="half", settings=here.settings)
    assert counted(half) == [3, 0, 256]  # as many as the dummy takes
    whole = enqueue_embeddings(texts, count_tokens=True, long="mean", settings=here.settings)
    assert counted(whole) == [3, 0, 300]
    plain = enqueue_embeddings(ITEMS, settings=here.settings)
    assert [(chunk.kept, chunk.tokens) for chunk in plain.iter_results(timeout=60)] == [(None, None)]
    assert not {"keep", "count_tokens"} & set(plain.status().options)


def test_jsonl_and_parquet_hold_them_and_npy_says_that_it_does_not(here: Here) -> None:
    items = [*ITEMS, {"text": "", "title": "no vector"}]
    submit = ("submit", write_corpus(here.folder, items), "--keep", "title,n,of,text", "-o")
    refused = here.embedctl(*submit, "out.npy", status=2)
    assert "can't hold the kept fields (title, n, of, text): name the output .jsonl or .parquet" in refused.stderr
    assert not list(here.raw.scan_iter("embed:job:*"))
    here.start_worker()
    done = here.embedctl(*submit, "out.jsonl", status=3)
    rows = [json.loads(line) for line in (here.folder / "out.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in (*KEEP, "text")} for row in rows] == kept_of(items, (*KEEP, "text"))
    assert list(rows[0]) == ["position", "id", "title", "n", "of", "text", "embedding"]
    assert rows[40]["error"]["code"] == "empty"

    job = done.stdout.strip()
    here.embedctl("fetch", job, "-o", "out.parquet", status=3)
    table = pq.read_table(here.folder / "out.parquet")
    assert {name: table.schema.field(name).type for name in KEEP} == {
        "title": pa.string(),
        "n": pa.float64(),
        "of": pa.string(),
    }
    assert table["title"].to_pylist() == [item.get("title") for item in items]
    assert table["n"].to_pylist() == [item.get("n") for item in items]
    assert [json.loads(cell or "null") for cell in table["of"].to_pylist()] == [item.get("of") for item in items]

    fetched = here.embedctl("fetch", job, "-o", "out.npy")
    assert "Not in out.npy: the kept fields (title, n, of, text). Fetch into a .jsonl or .parquet" in fetched.stderr


def test_what_is_retried_keeps_them(here: Here) -> None:
    small = here.start_worker("small")  # too little memory for a text of more than 100 tokens
    items = [{"text": "word " * size, "title": f"t{size}"} for size in (3, 150, 4)]
    job = enqueue_embeddings(items, keep=("title",), count_tokens=True, hardware="small", settings=here.settings)
    for _ in range(2):
        assert job.wait(timeout=60).failed == 1
        assert (found_in(job), counted(job)) == (kept_of(items, ("title",)), [3, 0, 4])
        assert job.retry_failed() == 1
    assert job.wait(timeout=60).failed == 1
    small.kill()
    assert job.retry_failed() == 1
    config = small.log_file.parent / "embedctl.toml"
    config.write_text(config.read_text().replace("memory_tokens = 100", "memory_tokens = 1000"))
    here.start_worker("small")
    assert job.wait(timeout=60).state is JobState.COMPLETED
    assert (found_in(job), counted(job)) == (kept_of(items, ("title",)), [3, 150, 4])
