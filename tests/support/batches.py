"""Batches of the gateway, as the official client makes and reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
from openai.types import Batch

from tests.support.gateway import NO_TLS, Running
from tests.support.waiting import eventually

ENDED = ("completed", "failed", "expired", "cancelled")


def client_of(gateway: Running, key: str = "none", retries: int = 0) -> openai.OpenAI:
    return client_at(gateway.url, key, retries)


def client_at(url: str, key: str = "none", retries: int = 0) -> openai.OpenAI:
    """OpenAI's client, for the gateway at a URL."""
    http = openai.DefaultHttpxClient(verify=NO_TLS)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, http_client=http)


def async_client_at(url: str) -> openai.AsyncOpenAI:
    """The same for coroutines."""
    http = openai.DefaultAsyncHttpxClient(verify=NO_TLS)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)


def lines_of(texts: Sequence[object], url: str = "/v1/embeddings", **body: Any) -> bytes:
    """A batch file; the custom ids are r0, r1 and so on."""
    field = "inputs" if url == "/embed_sparse" else "input"
    rows = (
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": url,
            "body": {"model": "dummy", field: text, **body},
        }
        for number, text in enumerate(texts)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def upload(client: openai.OpenAI, data: bytes, name: str = "requests.jsonl") -> str:
    return client.files.create(file=(name, data), purpose="batch").id


def create(client: openai.OpenAI, file_id: str, endpoint: Any = "/v1/embeddings", **options: Any) -> Batch:
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **options)


def ended(client: openai.OpenAI, batch_id: str) -> Batch:
    found: list[Batch] = []

    def look() -> bool:
        found[:] = [client.batches.retrieve(batch_id)]
        return found[0].status in ENDED

    eventually(look, what="the batch's end")
    return found[0]


def rows_in(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a file by custom id, each of which is there once."""
    assert file_id is not None
    rows = [json.loads(line) for line in client.files.content(file_id).content.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed
