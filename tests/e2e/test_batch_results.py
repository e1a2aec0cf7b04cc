"""The gateway's own calls of batches: answers while a batch runs, and the retry of what failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.batches import counts, create, ended, lines_of, rows_in, upload
from tests.support.gateway import Running
from tests.support.here import Here
from tests.support.waiting import eventually
from tests.support.workers import StartWorker


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Small chunks, so that a batch has several."""
    return settings.replace(chunk_size=10)


def ask(gateway: Running, batch_id: str, after: str | None = None) -> tuple[list[str], httpx2.Response]:
    """The custom ids of the next answers, and the whole response."""
    with gateway.client() as raw:
        answer = raw.get(f"/v1/batches/{batch_id}/results", params={"after": after} if after else {})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line)["custom_id"] for line in answer.text.splitlines()], answer


def followed(gateway: Running, batch_id: str) -> tuple[list[str], int]:
    """The custom ids of all answers, read while the batch runs, and how many of them came before its end."""
    found: list[str] = []
    early, after = 0, None

    def read() -> bool:
        nonlocal early, after
        ids, answer = ask(gateway, batch_id, after)
        found.extend(ids)
        after = answer.headers["x-last-line"]
        assert int(after.split(".")[0]) == len(found)
        if answer.headers["x-incomplete"] == "true":
            early += len(ids)
            return False
        return True

    eventually(read, what="the last answer")
    return found, early


def names(size: int) -> list[str]:
    return [f"r{number}" for number in range(size)]


def test_answers_come_while_the_batch_runs_each_once_and_in_order(
    gateway: Running, http: httpx2.Client, client: openai.OpenAI, start_worker: StartWorker
) -> None:
    texts = [f"{'word ' * 20} {number}" if number % 7 else "" for number in range(60)]
    made = create(client, upload(client, lines_of(texts)))
    ids, first = ask(gateway, made.id)
    assert (ids, first.headers["x-incomplete"], first.headers["x-last-line"]) == ([], "true", "0.0.0")
    start_worker("slow")
    found, early = followed(gateway, made.id)
    assert found == names(60)
    assert early >= 10
    assert counts(ended(client, made.id)) == (60, 51, 9)
    # And all of it, or the rest, from the files.
    whole, answer = ask(gateway, made.id)
    assert (whole, answer.headers["x-last-line"]) == (names(60), "60")
    assert ask(gateway, made.id, "55")[0] == names(60)[55:]
    assert ask(gateway, made.id, "60")[0] == []
    assert http.get(f"/v1/batches/{made.id}/results?after=x").status_code == 400


@pytest.mark.slow
def test_pages_end_within_a_chunk_and_within_a_request(
    here: Here, gateway: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker has done some of the chunks; requests of several texts lie across their borders."""
    monkeypatch.setattr("embedctl_gateway.batches.answers._PAGE_BYTES", 1)
    monkeypatch.setattr("embedctl_gateway.batches.runner._Work._look", lambda self: self._held.release(0.2))
    texts: list[Any] = [["one", f"two {number}", "three"] if number % 2 else f"text {number}" for number in range(20)]
    made = create(client, upload(client, lines_of(texts)))
    here.start_worker()
    eventually(lambda: [each.done for each in here.broker.jobs.newest()] == [40], what="all vectors")
    after, found = "0", []
    for _ in range(20):
        ids, answer = ask(gateway, made.id, after)
        found.append(ids)
        after = answer.headers["x-last-line"]
    assert found == [[each] for each in names(20)]
    # A number of lines alone leads to the same place.
    assert ask(gateway, made.id, "7")[0] == ["r7"]
    # So does the place of a job with other chunks.
    line, _, position = ask(gateway, made.id, "7")[1].headers["x-last-line"].split(".")
    assert ask(gateway, made.id, f"{line}.3.{position}")[0] == ["r8"]
    (job,) = here.broker.jobs.newest()
    with here.broker.connection.client() as redis_client:  # a chunk is not there yet: nothing comes out of turn
        redis_client.unlink(keys.chunk_result(job.id, 1))
    assert ask(gateway, made.id, "12")[0] == []


def retried(gateway: Running, batch_id: str, **headers: str) -> httpx2.Response:
    with gateway.client() as raw:
        return raw.post(f"/v1/batches/{batch_id}/retry", headers=headers)


def test_what_has_no_vectors_is_retried(gateway: Running, client: openai.OpenAI, start_worker: StartWorker) -> None:
    texts: list[object] = ["one", "", "two", ["three", ""], "four"]
    data = lines_of(texts).replace(b"\n", b"\r\n\n", 2).removesuffix(b"\n")  # as other programs may write it
    made = create(client, upload(client, data), metadata={"for": "a test"})
    early = retried(gateway, made.id)
    assert (early.status_code, "has ended" in early.text) == (400, True)
    start_worker()
    batch = ended(client, made.id)
    assert counts(batch) == (5, 3, 2)
    answer = retried(gateway, made.id)
    again = answer.json()
    assert (answer.status_code, again["embedctl"]) == (200, {"retry_of": made.id})
    assert (again["input_file_id"], again["metadata"]) == (batch.input_file_id, {"for": "a test"})
    later = ended(client, again["id"])
    assert (later.status, counts(later), later.output_file_id) == ("completed", (2, 0, 2), None)
    assert set(rows_in(client, later.error_file_id)) == {"r1", "r3"}
    third = retried(gateway, later.id).json()
    assert counts(ended(client, third["id"])) == (2, 0, 2)
    # A second try of the same call, as the official client marks it, finds the batch of the first.
    assert retried(gateway, made.id, **{"x-stainless-retry-count": "1"}).json()["id"] == again["id"]


def test_a_retry_after_cancel_does_the_rest(gateway: Running, client: openai.OpenAI, start_worker: StartWorker) -> None:
    made = create(client, upload(client, lines_of([f"text {number}" for number in range(30)])))
    eventually(lambda: counts(client.batches.retrieve(made.id))[0] == 30, what="the reading of the requests")
    client.batches.cancel(made.id)
    ended(client, made.id)
    start_worker()
    later = ended(client, retried(gateway, made.id).json()["id"])
    assert (later.status, counts(later)) == ("completed", (30, 30, 0))
    assert set(rows_in(client, later.output_file_id)) == set(names(30))
    nothing = retried(gateway, later.id)
    assert (nothing.status_code, "has its vectors" in nothing.text) == (400, True)


def test_what_ended_unread_is_retried(gateway: Running, client: openai.OpenAI, start_worker: StartWorker) -> None:
    start_worker()

    def unread_batch(make: Callable[[], str]) -> str:
        gateway.gateway.runner.stop()
        batch_id = make()
        client.batches.cancel(batch_id)
        gateway.gateway.runner.start()
        batch = ended(client, batch_id)
        assert (batch.status, counts(batch), batch.error_file_id) == ("cancelled", (0, 0, 0), None)
        return batch_id

    unread = unread_batch(lambda: create(client, upload(client, lines_of(["one", "", "two"]))).id)
    whole = ended(client, retried(gateway, unread).json()["id"])
    assert counts(whole) == (3, 2, 1)
    # Of a retry, only what it was to do is left.
    unread = unread_batch(lambda: str(retried(gateway, whole.id).json()["id"]))
    rest = ended(client, retried(gateway, unread).json()["id"])
    assert (set(rows_in(client, rest.error_file_id)), counts(rest)) == ({"r1"}, (1, 0, 1))
