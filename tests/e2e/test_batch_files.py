"""OpenAI's batch files through the command line: in the place of `vllm run-batch`, and through a cluster."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from embedctl import enqueue_embeddings
from embedctl.waiting.results import Vectors
from tests.support.here import Here
from tests.support.jobs import reference

REQUESTS: list[dict[str, Any]] = [
    {
        "custom_id": f"request-{i}",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {
            "model": "dummy",
            "input": f"text {i}" if i % 3 else [f"text {i} {each}" for each in range(1 + i % 7)],
        },
    }
    for i in range(40)
]
REQUESTS[4]["body"]["encoding_format"] = "base64"
EMPTY = {"custom_id": "empty", "body": {"model": "dummy", "input": ["fine", ""]}}
LONG = {"custom_id": "long", "body": {"model": "dummy", "input": "word " * 300}}


def write(folder: Path, rows: list[dict[str, Any]], name: str = "requests.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return name


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def vectors_of(line: dict[str, Any]) -> Vectors:
    found = [each["embedding"] for each in line["response"]["body"]["data"]]
    return np.array([np.frombuffer(base64.b64decode(v), "<f4") if isinstance(v, str) else v for v in found], np.float32)


def assert_answered(lines: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Each request has its vectors and its tokens, in order, as the official types have it."""
    types = pytest.importorskip("openai.types", reason="needs the package openai")
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows]
    assert len({line["id"] for line in lines}) == len(lines)
    for line, row in zip(lines, rows, strict=True):
        given = row["body"]["input"]
        texts = [given] if isinstance(given, str) else given
        np.testing.assert_array_equal(vectors_of(line), reference(texts))
        body = line["response"]["body"]
        assert isinstance(body["data"][0]["embedding"], str) == (row["body"].get("encoding_format") == "base64")
        for each, vector in zip(body["data"], vectors_of(line).tolist(), strict=True):
            each["embedding"] = vector  # as the official client decodes it
        answer = types.CreateEmbeddingResponse.model_validate(body, strict=True)
        assert [each.index for each in answer.data] == list(range(len(texts)))
        assert (answer.model, answer.usage.prompt_tokens) == ("dummy", sum(len(text.split()) for text in texts))


def test_requests_for_sparse_and_multi_vectors(here: Here) -> None:
    here.start_worker()
    texts = [["red green red", "blue"], "green"]
    flat = ["red green red", "blue", "green"]
    for name, url, texts_are in (("sparse", "/embed_sparse", "inputs"), ("multi", "/pooling", "input")):
        more = {"encoding_format": "base64"} if name == "multi" else {}
        bodies_asked = [{texts_are: texts[0]}, {texts_are: texts[1], **more}]
        rows = [{"custom_id": str(at), "url": url, "body": body} for at, body in enumerate(bodies_asked)]
        corpus = write(here.folder, rows, f"{name}.jsonl")
        done = here.embedctl("submit", corpus, "--chunk-size", "1", "-o", "answers.jsonl", status=0)
        bodies = [line["response"]["body"] for line in lines_of(here.folder / "answers.jsonl")]
        job = enqueue_embeddings(flat, vectors=name, settings=here.settings)
        job.wait(timeout=60)
        if name == "sparse":
            found = [{pair["index"]: np.float32(pair["value"]) for pair in each} for body in bodies for each in body]
            expected = [dict(zip(each.indices.tolist(), each.weights.tolist(), strict=True)) for each in job.sparse()]
            assert [len(body) for body in bodies] == [2, 1]
            assert found == expected
        else:
            assert [[each["index"] for each in body["data"]] for body in bodies] == [[0, 1], [0]]
            *lists, coded = [each["data"] for body in bodies for each in body["data"]]
            vectors = [*map(np.array, lists), np.frombuffer(base64.b64decode(coded), "<f4").reshape(-1, 16)]
            for each, record in zip(vectors, job.multi(), strict=True):
                np.testing.assert_array_equal(each.astype(np.float32), record.vectors)
        fetched = here.embedctl("fetch", done.stdout.strip(), "-o", "again.jsonl", "-i", corpus, status=0)
        assert (here.folder / "again.jsonl").read_bytes() == (here.folder / "answers.jsonl").read_bytes(), fetched
        refused = here.embedctl("submit", corpus, "--vectors", name)
        assert (refused.returncode, "omit --vectors" in refused.stderr) == (2, True), refused.stderr


def test_a_batch_file_is_told_by_its_first_line_and_answered(here: Here) -> None:
    here.start_worker()
    corpus = write(here.folder, [*REQUESTS, EMPTY, LONG])
    submitted = here.embedctl("submit", corpus, "--chunk-size", "5", "-o", "results.jsonl", status=3)
    assert_answered(lines_of(here.folder / "results.jsonl"), REQUESTS)
    errors = lines_of(here.folder / "results.errors.jsonl")
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("empty", 400), ("long", 400)]
    assert [line["response"]["body"]["error"]["code"] for line in errors] == ["empty_input", "context_length_exceeded"]

    job = submitted.stdout.strip()
    refused = here.embedctl("fetch", job, "-o", "results.jsonl", "--no-clobber")
    assert (refused.returncode, "results.jsonl exists" in refused.stderr) == (2, True)
    printed = here.embedctl("fetch", job, "-o", "-", status=3)
    together = [json.loads(line) for line in printed.stdout.splitlines()]
    assert_answered(together[:-2], REQUESTS)
    assert together[-2:] == errors
    # In other formats, each text is a row.
    here.embedctl("fetch", job, "-o", "plain.jsonl", "--format", "jsonl", status=3)
    first = lines_of(here.folder / "plain.jsonl")[0]
    assert {name: first[name] for name in ("id", "index", "inputs")} == {"id": "request-0", "index": 0, "inputs": 1}
    fetched = here.embedctl("fetch", job, "-o", "out.parquet")
    assert (fetched.returncode, "Not in" in fetched.stderr) == (3, False)
    assert pq.read_table(here.folder / "out.parquet")["id"].to_pylist()[-3:] == ["empty", "empty", "long"]
