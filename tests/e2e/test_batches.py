"""Files and batches of the gateway, with the official client, a real Redis and real workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import redis
from openai.types import Batch

from embedctl import enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl.queueing.sweeper import Sweeper
from embedctl.store.batches import BatchStore
from embedctl.store.stored_files import PART_BYTES
from embedctl_config import keys
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.retry import Policy
from embedctl_config.tenants import TenantEntry
from embedctl_gateway.access.admission import UPLOADS
from tests.support.batches import (
    async_client_at,
    client_at,
    client_of,
    counts,
    create,
    ended,
    lines_of,
    rows_in,
    upload,
)
from tests.support.gateway import NO_TLS, Running, gateway_with_keys, killed_gateway, running_gateway
from tests.support.here import Here
from tests.support.limits import settings_of
from tests.support.prepared import Put, stop
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

LONG = "word " * 300


def test_a_batch_from_its_upload_to_its_vectors(here: Here, client: openai.OpenAI) -> None:
    here.start_worker()
    texts = ["one", "two words", LONG, "", "three words here"]
    file_id = upload(client, lines_of(texts))
    made = create(
        client, file_id, metadata={"for": "a test"}, output_expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (made.status, made.object, made.metadata) == ("validating", "batch", {"for": "a test"})
    batch = ended(client, made.id)
    assert (batch.status, counts(batch), batch.model) == ("completed", (5, 3, 2), "dummy")
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.total_tokens) == (6, 6)
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    good, bad = rows_in(client, batch.output_file_id), rows_in(client, batch.error_file_id)
    assert (set(good), set(bad)) == ({"r0", "r1", "r4"}, {"r2", "r3"})
    at_once = client.embeddings.create(input=[texts[0], texts[1], texts[4]], model="dummy")
    vectors = [good[name]["response"]["body"]["data"][0]["embedding"] for name in ("r0", "r1", "r4")]
    np.testing.assert_allclose(vectors, [each.embedding for each in at_once.data], atol=1e-6)
    assert [bad[name]["response"]["body"]["error"]["code"] for name in ("r2", "r3")] == [
        "context_length_exceeded",
        "empty_input",
    ]
    output = client.files.retrieve(batch.output_file_id or "")
    assert (output.filename, output.expires_at) == (f"{batch.id}_output.jsonl", output.created_at + 7200)
    assert {each.id for each in client.files.list()} == {file_id, batch.output_file_id, batch.error_file_id}
    assert [each.id for each in client.files.list(purpose="batch")] == [file_id]
    eventually(lambda: not list(here.broker.jobs.newest()), what="the end of the batch's job")


def test_batches_of_sparse_and_multi_vectors(here: Here, client: openai.OpenAI, http: httpx2.Client) -> None:
    here.start_worker()
    texts = ["one", ["two words", "one"], LONG, ["", "x"]]
    for url, texts_are in (("/pooling", "input"), ("/embed_sparse", "inputs")):
        batch = ended(client, create(client, upload(client, lines_of(texts, url)), url).id)
        assert (batch.status, batch.endpoint, counts(batch)) == ("completed", url, (4, 2, 2))
        good, bad = rows_in(client, batch.output_file_id), rows_in(client, batch.error_file_id)
        for name, given in zip(("r0", "r1"), texts, strict=False):
            at_once = http.post(url, json={texts_are: given}).json()
            body = good[name]["response"]["body"]
            if url == "/pooling":
                assert (body["object"], body["id"][:5], body["created"] > 0) == ("list", "pool-", True)
                at_once |= {"id": body["id"], "created": body["created"]}
            assert body == at_once
        errors = [bad[name]["response"]["body"]["error"] for name in ("r2", "r3")]
        assert [(each["code"], each["param"]) for each in errors] == [
            ("context_length_exceeded", texts_are),
            ("empty_input", texts_are),
        ]
        assert errors[1]["message"].startswith(f"{texts_are}[0]: ")
        assert [json.loads(line) for line in http.get(f"/v1/batches/{batch.id}/results").text.splitlines()] == [
            {**good, **bad}[f"r{number}"] for number in range(4)
        ]
    other = ended(client, create(client, upload(client, lines_of(["one"], "/embed_sparse")), "/pooling").id)
    assert other.errors is not None
    assert [(each.code, each.param) for each in other.errors.data or []] == [("url_mismatch", "url")]
    here.start_worker("colbert", model="colbert")
    lacks = lines_of(["one"], "/embed_sparse", model="colbert")
    failed = ended(client, create(client, upload(client, lacks), "/embed_sparse").id)
    assert failed.errors is not None
    assert (failed.status, "gives no sparse vectors" in str(failed.errors.data)) == ("failed", True)


def test_every_bad_line_is_told_and_nothing_is_queued(client: openai.OpenAI, broker: Broker) -> None:
    rows = lines_of(["one", "two", 3]).splitlines()
    bad = [*rows, b"{", rows[0], b"", b'{"custom_id": "x", "body": {"input": [[1]]}}']
    batch = ended(client, create(client, upload(client, b"\n".join(bad))).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None
    told = batch.errors.data or []
    assert [(each.line, each.code, each.param) for each in told] == [
        (4, "invalid_json_line", None),
        (5, "duplicate_custom_id", "custom_id"),
        (7, "invalid_type", "body.input"),
    ]
    assert all("/" not in (each.message or "") for each in told)
    assert not list(broker.jobs.newest())


def test_cancelling_keeps_what_is_done(here: Here) -> None:
    here.start_worker("slow")
    texts = [f"{'word ' * 50} {number}" for number in range(400)]  # more than half a minute of work
    with running_gateway(here.settings.replace(chunk_size=10)) as gateway, client_of(gateway) as client:
        made = create(client, upload(client, lines_of(texts)))
        eventually(lambda: counts(client.batches.retrieve(made.id))[1] > 0, what="the first vectors")
        assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
        batch = ended(client, made.id)
        assert (batch.status, client.batches.cancel(made.id).status) == ("cancelled", "cancelled")
        good, bad = rows_in(client, batch.output_file_id), rows_in(client, batch.error_file_id)
    assert counts(batch) == (400, len(good), len(bad))
    assert {*good, *bad} == {f"r{number}" for number in range(400)}
    assert {row["error"]["code"] for row in bad.values()} == {"batch_cancelled"}


def test_a_batch_that_nobody_serves_waits_and_expires(client: openai.OpenAI, broker: Broker) -> None:
    made = create(client, upload(client, lines_of(["one", "two"])))
    eventually(lambda: counts(client.batches.retrieve(made.id))[0] == 2, what="the check of the requests")
    with broker.connection.client() as redis_client:
        redis_client.zadd(keys.DEADLINES, {made.id: 0})
    batch = ended(client, made.id)
    assert (batch.status, counts(batch), batch.output_file_id) == ("expired", (2, 0, 2), None)
    assert batch.expired_at is not None
    assert {row["error"]["code"] for row in rows_in(client, batch.error_file_id).values()} == {"batch_expired"}
    with pytest.raises(openai.BadRequestError, match="expired already"):
        client.batches.cancel(made.id)


def test_pages_of_25_batches(client: openai.OpenAI, gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.batches.runner.Runner._one", lambda *_: False)
    file_id = upload(client, lines_of(["one"]))
    made = [create(client, file_id).id for _ in range(25)]
    assert len(set(made)) == 25
    assert {each.id for each in client.batches.list(limit=20)} == set(made)
    page = client.batches.list()
    assert (len(page.data), page.has_more) == (20, True)
    assert [each.created_at for each in page.data] == sorted((each.created_at for each in page.data), reverse=True)

    async def ask() -> list[str]:
        async with async_client_at(gateway.url) as other:
            await other.files.create(file=("more.jsonl", lines_of(["two"])), purpose="batch")
            return [each.id async for each in other.batches.list(limit=7)]

    found = asyncio.run(ask())
    assert (len(found), set(found)) == (25, set(made))
    assert [each.filename for each in client.files.list(order="asc", limit=1)] == ["requests.jsonl", "more.jsonl"]


#: Fields of a request for a batch → the status, the code and the field of its refusal.
WRONG: list[tuple[dict[str, object], int, str, str]] = [
    ({"endpoint": "/v1/completions"}, 400, "invalid_value", "endpoint"),
    ({"completion_window": "1h"}, 400, "invalid_value", "completion_window"),
    ({"completion_window": None}, 400, "missing_required_parameter", "completion_window"),
    ({"input_file_id": 3}, 400, "invalid_type", "input_file_id"),
    ({"input_file_id": "file-000000000000000000000000"}, 404, "not_found", "input_file_id"),
    ({"metadata": {"a": 1}}, 400, "invalid_type", "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, 400, "invalid_value", "metadata"),
    ({"metadata": {"a": "b" * 513}}, 400, "invalid_value", "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, 400, "invalid_value", "output_expires_after"),
    ({"priority": 1}, 400, "unsupported_parameter", "priority"),
]


def test_wrong_requests_are_refused(http: httpx2.Client, client: openai.OpenAI) -> None:
    file_id = upload(client, lines_of(["one"]))
    right = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    for fields, status, code, param in WRONG:
        answer = http.post("/v1/batches", json={**right, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), fields
    form = {"purpose": "batch"}
    soon = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}
    for data, files, code in (
        ({}, {"file": b"x"}, "missing_required_parameter"),
        ({"purpose": "fine-tune"}, {"file": b"x"}, "invalid_value"),
        ({**form, "colour": "red"}, {"file": b"x"}, "unsupported_parameter"),
        ({**form, **soon}, {"file": b"x"}, "invalid_value"),
        (form, {"other": b"x"}, "unsupported_parameter"),
        (form, {}, "invalid_content_type"),
    ):
        answer = http.post("/v1/files", data=data, files=files or None)
        assert (answer.status_code, answer.json()["error"]["code"] == code) in ((400, True),), answer.text
    for path in ("files?limit=0", "files?order=up", "files?after=x", "batches?limit=101", "batches?limit=x"):
        assert http.get(f"/v1/{path}").status_code == 400
    for path in ("files/file-1", "files/file-000000000000000000000000", "batches/batch_x", "files/x/content"):
        assert http.get(f"/v1/{path}").status_code == 404


def test_files_are_kept_and_deleted(client: openai.OpenAI, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.batches.runner.Runner._one", lambda *_: False)  # it would miss the file
    data = lines_of(["one", "two"])
    made = client.files.create(
        file=("a.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (made.bytes, made.filename, made.object, made.status) == (len(data), "a.jsonl", "file", "processed")
    assert made.expires_at == made.created_at + 3600
    assert 3_500_000 < raw.pttl(keys.file(made.id)) <= 3_600_000
    assert -1 not in [raw.pttl(key) for key in raw.keys("embed:*")]  # one may be gone meanwhile
    batch = create(client, made.id)
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    assert not list(client.files.list())
    assert not raw.keys("embed:job:*:out:0")
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    client.batches.cancel(batch.id)


def test_downloads_in_ranges(client: openai.OpenAI, http: httpx2.Client) -> None:
    data = bytes(range(256)) * ((2 * PART_BYTES + 1000) // 256)
    file_id = upload(client, data)
    etag = f'"{hashlib.sha256(data).hexdigest()}"'
    url = f"/v1/files/{file_id}/content"
    whole = http.get(url)
    assert (whole.status_code, whole.content == data) == (200, True)
    assert (whole.headers["etag"], whole.headers["accept-ranges"]) == (etag, "bytes")
    head = http.head(url)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(data)), b"")
    got, step = b"", 3_000_000
    while len(got) < len(data):  # as after broken downloads
        part = http.get(url, headers={"range": f"bytes={len(got)}-{len(got) + step - 1}", "if-range": etag})
        assert part.status_code == 206
        assert part.headers["content-range"] == f"bytes {len(got)}-{len(got) + len(part.content) - 1}/{len(data)}"
        got += part.content
    assert got == data
    assert http.get(url, headers={"range": "bytes=0-1", "if-range": '"other"'}).content == data
    over = http.get(url, headers={"range": f"bytes={len(data)}-"})
    assert (over.status_code, over.headers["content-range"]) == (416, f"bytes */{len(data)}")


def test_a_broken_upload_is_gone(
    gateway: Running, http: httpx2.Client, client: openai.OpenAI, raw: redis.Redis
) -> None:
    head = "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    begin = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * (PART_BYTES + 10)
    with gateway.connect() as connection:
        connection.sendall(f"{head}content-length: 99999999\r\n\r\n".encode() + begin)
        eventually(lambda: raw.keys("embed:job:*:out:0"), what="the first part")
    eventually(lambda: not raw.keys("embed:job:*:out:0"), what="the end of the first part")
    assert not list(client.files.list())
    # A form without its end:
    short = http.post("/v1/files", content=begin, headers={"content-type": "multipart/form-data; boundary=b"})
    assert (short.status_code, short.json()["error"]["code"]) == (400, "invalid_form")
    eventually(lambda: gateway.gateway.admission.held == 0)


def test_uploads_that_bring_nothing_hold_up_nobody_and_end(here: Here) -> None:
    with (
        gateway_with_keys(here.settings, here.folder, "eve", "bob", body_s=5.0) as (gateway, (mine, theirs)),
        running_gateway(gateway.gateway.settings) as second,
        ExitStack() as opened,
    ):
        head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {mine}\r\n"
        form = "content-length: 100000\r\ncontent-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
        begin = f"{head}{form}".encode()
        idle = [opened.enter_context(gateway.connect()) for _ in range(UPLOADS.most + 1)]
        for each in idle:
            each.sendall(begin)
        most = UPLOADS.most // 2
        eventually(lambda: here.raw.hget(keys.ledger("sums"), "uploads") == b"%d" % most, what="the idle uploads")
        for each_gateway in (gateway, second):
            with client_of(each_gateway, theirs) as bob:
                upload(bob, lines_of(["one"]))
        with client_of(second, mine) as eve, pytest.raises(openai.RateLimitError):
            upload(eve, lines_of(["one"]))
        answers = Counter(each.recv(12).removeprefix(b"HTTP/1.1 ") for each in idle)
        assert answers == {b"408": most, b"429": len(idle) - most}
        eventually(lambda: here.raw.hgetall(keys.ledger("sums")) == {}, what="the end of the uploads")


def test_a_second_try_finds_what_the_first_one_made(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.batches.runner.Runner._one", lambda *_: False)
    again = {"x-stainless-retry-count": "1"}
    data = lines_of(["one"])
    first = client.files.create(file=("a.jsonl", data), purpose="batch")
    assert client.files.create(file=("b.jsonl", data), purpose="batch", extra_headers=again).id != first.id
    assert client.files.create(file=("a.jsonl", data), purpose="batch").id != first.id
    one = create(client, first.id, metadata={"a": "1"})
    assert create(client, first.id, metadata={"a": "2"}, extra_headers=again).id != one.id
    late = create(client, first.id, extra_headers=again)  # the first try is still on its way
    assert create(client, first.id).id == late.id
    named = {"idempotency-key": "mine"}
    assert create(client, first.id, extra_headers=named).id == create(client, first.id, extra_headers=named).id


def test_a_key_that_names_another_request_is_refused(client: openai.OpenAI, raw: redis.Redis) -> None:
    named = {"idempotency-key": "mine"}
    first = client.files.create(file=("a.jsonl", lines_of(["one"])), purpose="batch", extra_headers=named)
    parts = set(raw.keys("embed:job:*:out:*"))
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.files.create(file=("a.jsonl", lines_of(["two"])), purpose="batch", extra_headers=named)
    assert refused.value.code == "idempotency_key_reused"
    assert [each.id for each in client.files.list()] == [first.id]
    eventually(lambda: set(raw.keys("embed:job:*:out:*")) == parts, what="the end of the second file's parts")
    batch = create(client, first.id, extra_headers=named)  # the call is part of the key
    with pytest.raises(openai.UnprocessableEntityError):
        create(client, first.id, metadata={"a": "1"}, extra_headers=named)
    client.batches.cancel(batch.id)
    ended(client, batch.id)
    retried = client.post(f"/batches/{batch.id}/retry", cast_to=Batch, options={"headers": named})
    assert retried.id != batch.id


def test_a_cancelled_retry_ends_although_the_file_that_it_retries_is_gone(client: openai.OpenAI) -> None:
    first = create(client, upload(client, lines_of(["one", "two"])))
    eventually(lambda: counts(client.batches.retrieve(first.id))[0] == 2, what="the check of the requests")
    client.batches.cancel(first.id)
    first = ended(client, first.id)
    retry = client.post(f"/batches/{first.id}/retry", cast_to=Batch)
    eventually(lambda: counts(client.batches.retrieve(retry.id))[0] == 2, what="the check of the retry")
    client.files.delete(first.error_file_id or "")
    client.batches.cancel(retry.id)
    retry = ended(client, retry.id)
    assert (retry.status, counts(retry), retry.error_file_id) == ("cancelled", (2, 0, 2), None)
    assert retry.errors is not None
    assert [each.code for each in retry.errors.data or []] == ["invalid_input_file"]


def test_a_clock_of_a_gateway_ends_no_batch(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    now, end_late, looks = time.time, BatchStore.end_late, Counter[str]()
    monkeypatch.setattr(time, "time", lambda: now() + 25 * 3600)

    def counted(store: BatchStore, *, told: bool) -> list[str]:
        looks["made"] += 1
        return end_late(store, told=told)

    monkeypatch.setattr(BatchStore, "end_late", counted)
    made = create(client, upload(client, lines_of(["one"])))
    eventually(lambda: counts(client.batches.retrieve(made.id))[0] == 1, what="the check of the request")
    assert abs(made.created_at - now()) < 3600
    seen = looks["made"]
    eventually(lambda: looks["made"] > seen + 1, what="a whole look for late batches")
    assert client.batches.retrieve(made.id).status == "validating"


def test_a_dropped_answer_and_a_retry_make_one_batch(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.batches.runner.Runner._one", lambda *_: False)
    dropped: list[str] = []

    class Dropping(httpx2.HTTPTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            answer = super().handle_request(request)
            if request.method == "POST" and request.url.path not in dropped:
                dropped.append(request.url.path)
                answer.close()
                raise httpx2.ReadError("the answer is lost")
            return answer

    with (
        httpx2.Client(transport=Dropping(), verify=NO_TLS) as http,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=1, http_client=http) as client,
    ):
        batch = create(client, upload(client, lines_of(["one"])))
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert len(list(client.files.list())) == 1
    assert dropped == ["/v1/files", "/v1/batches"]


def test_two_keys_see_nothing_of_each_other(here: Here) -> None:
    here.start_worker()
    with (
        gateway_with_keys(here.settings, here.folder, "search", "ads") as (gateway, (mine, theirs)),
        client_of(gateway, mine) as alice,
        client_of(gateway, theirs) as bob,
    ):
        file_id = upload(alice, lines_of(["one"]))
        batch = ended(alice, create(alice, file_id).id)
        assert batch.status == "completed"
        for ask in (
            lambda: bob.files.retrieve(file_id),
            lambda: bob.files.content(file_id),
            lambda: bob.files.content(batch.output_file_id or ""),
            lambda: bob.files.delete(file_id),
            lambda: create(bob, file_id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert (list(bob.files.list()), list(bob.batches.list())) == ([], [])
        assert not list(bob.files.list(after=file_id))
        assert alice.files.retrieve(file_id).id == file_id
        with gateway.client(theirs) as raw, gateway.client() as nobody:
            assert raw.post(f"/v1/batches/{batch.id}/retry").status_code == 404
            for call, status in ((f"batches/{batch.id}/results", 404), ("files", 200), ("batches", 200)):
                assert [each.get(f"/v1/{call}").status_code for each in (raw, nobody)] == [status, 401]


@pytest.mark.slow
def test_parts_outside_of_redis_stay_as_long_as_their_file(here: Here, environment: dict[str, str]) -> None:
    data = here.folder / "data"
    environment |= {"EMBEDCTL_CHUNK_FILES": str(data), "LIMIT_CHUNK_INLINE_BYTES": "0"}
    settings = settings_of(environment)
    here.start_worker()

    def kept() -> list[Path]:
        return [path for path in data.rglob("*") if path.is_file() and "/out/" in str(path)]

    broker = Broker.connect(settings)
    with running_gateway(settings) as gateway, client_of(gateway) as client:
        file_id = upload(client, lines_of(["one", "two"]) + (b" " * 1023 + b"\n") * (PART_BYTES // 1024))
        assert len(kept()) == 2
        batch = ended(client, create(client, file_id).id)
        assert len(rows_in(client, batch.output_file_id)) == 2
        eventually(lambda: len(kept()) == 3, what="the end of the job's own chunks")
        sweep(broker)
        assert len(kept()) == 3
        client.files.delete(file_id)
        (part,) = kept()
        with broker.connection.client() as redis_client:  # as if its time to live were over
            redis_client.unlink(keys.chunk_result(part.parts[-4], 0))
        sweep(broker)
        eventually(lambda: not kept(), what="the sweep")
    broker.close()


def sweep(broker: Broker) -> None:
    sweeper = Sweeper(broker, grace_s=0.0, rest_s=0.001, again_s=0.0)
    for _ in range(3):
        with broker.connection.client() as client:
            client.unlink(keys.SWEEP)
            client.hdel(keys.NOTES, "data_next_ms")
        sweeper.round()


#: Where a gateway stops in a batch, by the state in which that leaves the batch.
STOPS = {
    "validating": ("_Work", "_validate"),
    "submitting": ("_Work", "_submitting"),
    "submitted": ("_Work", "_begin"),
    "in_progress": ("_Work", "_look"),
    "finalizing": ("_Held", "end"),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("where", STOPS)
def test_another_gateway_resumes_after_a_kill(here: Here, where: str, environment: dict[str, str]) -> None:
    here.start_worker()
    (temporary := here.folder / "temporary").mkdir()
    environment |= {"EMBEDCTL_HARDWARE": "auto", "EMBEDCTL_CHUNK_SIZE": "10", "TMPDIR": str(temporary)}
    texts = [f"text {number}" for number in range(100)]
    name, method = STOPS[where]
    stopping = Put(
        {("embedctl_config.keys", "PRODUCER_LEASE_S"): 1, (f"embedctl_gateway.batches.runner:{name}", method): stop}
    )
    with killed_gateway(environment, stopping) as (url, said):
        with client_at(url) as client:
            made = create(client, upload(client, lines_of(texts)))
        assert "here\n" in said
    assert not list(temporary.iterdir())
    here.raw.zadd(keys.unfinished("default"), {made.id: 0})  # its lease has lapsed
    here.start_worker()  # a new job would have other chunks; this one keeps its own
    with running_gateway(here.settings.replace(chunk_size=10)) as second, client_of(second) as client:
        batch = ended(client, made.id)
        assert (batch.status, counts(batch)) == ("completed", (100, 100, 0))
        assert set(rows_in(client, batch.output_file_id)) == {f"r{number}" for number in range(100)}
        assert [each.id for each in client.batches.list()] == [made.id]
        assert len(list(client.files.list())) == 2
    eventually(lambda: not list(here.broker.jobs.newest()), what="the end of the batch's job")


def test_a_batch_waits_while_its_tenant_has_no_room(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.batches.runner._NO_ROOM_S", 0.2)
    here.broker.quotas.state("default", TenantEntry(max_jobs=1), by="a test", since_ms=1)
    first = enqueue_embeddings(["one"], settings=here.settings)
    with running_gateway(here.settings, hardware="dummy") as gateway, client_of(gateway) as client:
        made = create(client, upload(client, lines_of(["one", "two"])))
        eventually(lambda: counts(client.batches.retrieve(made.id))[0] == 2, what="the check of the requests")
        time.sleep(1)  # several tries; a busy machine may hide one that makes the job
        assert client.batches.retrieve(made.id).status == "validating"
        first.discard()
        here.start_worker()
        assert counts(ended(client, made.id)) == (2, 2, 0)


@pytest.mark.parametrize("lost", ["the making", "the reading"])
def test_a_create_with_a_lost_answer_is_known(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr("embedctl_gateway.batches.runner.Runner._one", lambda *_: False)
    file_id = upload(client, lines_of(["one"]))
    calls: list[str] = []

    def once_in_vain(done: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            found = done(*args, **options)
            calls.append("")
            if len(calls) == 1:
                raise BrokerUnavailable("the answer is lost")
            return found

        return call

    with monkeypatch.context() as patched:
        name = "make" if lost == "the making" else "get"
        patched.setattr(BatchStore, name, once_in_vain(getattr(BatchStore, name)))
        made = create(client, file_id)
        assert len(calls) == 2
    assert [each.id for each in client.batches.list()] == [made.id]


def test_a_create_that_fails_leaves_no_batch_that_runs(
    gateway: Running, client: openai.OpenAI, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis makes the batch, and is gone before it says so."""
    monkeypatch.setattr("embedctl_gateway.calls.batches._SURE_S", 0.0)
    monkeypatch.setattr("embedctl_gateway.calls.common.ASIDE", Policy(0.05, 0.05))
    file_id = upload(client, lines_of(["one"]))
    make, cancel, tries = BatchStore.make, BatchStore.cancel, iter(range(100))

    def made_in_vain(*args: Any, **options: Any) -> str:
        make(*args, **options)
        raise BrokerUnavailable("the answer is lost")

    def late(*args: Any) -> str | None:
        if next(tries) < 3:
            raise BrokerUnavailable("Redis is still away")
        return cancel(*args)

    with monkeypatch.context() as patched:
        patched.setattr("embedctl_gateway.batches.runner.Runner._one", lambda *_: False)
        patched.setattr(BatchStore, "make", made_in_vain)
        patched.setattr(BatchStore, "cancel", late)
        with pytest.raises(openai.InternalServerError) as refused:
            create(client, file_id)
        assert refused.value.status_code == 503
        (batch,) = client.batches.list()
        eventually(lambda: client.batches.retrieve(batch.id).status == "cancelling", what="the withdrawal")
    start_worker()
    assert (ended(client, batch.id).status, counts(client.batches.retrieve(batch.id))[1]) == ("cancelled", 0)
