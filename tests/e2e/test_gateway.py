"""The gateway with real clients, a real Redis and real workers."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import re
import signal
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import httpx2
import jsonschema
import numpy as np
import openai
import pytest
import redis
import trustme

from embedctl import enqueue_embeddings
from embedctl.jobs import enqueue
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings
from embedctl_gateway.access.key_file import add_key
from embedctl_gateway.calls import common
from tests.support.batches import async_client_at, client_of, create, ended, lines_of, rows_in, upload
from tests.support.forked import Forked
from tests.support.gateway import NO_TLS, Running, error_of, jobs_left, request_bytes, running_gateway
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.packages import need
from tests.support.prepared import DieAt
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
TEXTS = ["one", "two words", "three words here"]


@pytest.mark.client(
    "openai", "lists models; embeds, as base64 and as floats, with `dimensions`: the vectors of the library"
)
def test_the_official_client_gets_the_vectors_of_the_library(here: Here, gateway: Running) -> None:
    here.start_worker()
    job = enqueue_embeddings(TEXTS, settings=here.settings)
    job.wait(timeout=60)
    expected = job.vectors()
    job.discard()
    with client_of(gateway) as client:
        assert [each.id for each in client.models.list()] == ["dummy"]
        assert client.models.retrieve("dummy").owned_by == "embedctl"
        answer = client.embeddings.create(input=TEXTS, model="dummy")  # asks for base64
        plain = client.embeddings.create(input=TEXTS, model="dummy", encoding_format="float")
        one = client.embeddings.create(input=TEXTS[1], model="dummy", dimensions=4, user="somebody")
    assert answer.model == "dummy"
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (6, 6)
    for got in (answer, plain):
        np.testing.assert_allclose([each.embedding for each in got.data], expected, atol=1e-6)
    shorter = expected[1, :4] / np.linalg.norm(expected[1, :4])
    np.testing.assert_allclose(one.data[0].embedding, shorter, atol=1e-6)
    eventually(lambda: not jobs_left(here.broker), what="the end of the requests' jobs")


@pytest.mark.client("openai", "16 requests at once of the asynchronous client, to two gateways")
def test_the_asynchronous_client_and_two_gateways(here: Here) -> None:
    here.start_worker()

    async def ask(url: str, number: int) -> list[float]:
        async with async_client_at(url) as client:
            return (await client.embeddings.create(input=f"text {number}", model="dummy")).data[0].embedding

    async def ask_all(urls: list[str]) -> list[list[float]]:
        return await asyncio.gather(*(ask(urls[number % 2], number) for number in range(16)))

    with running_gateway(here.settings) as one, running_gateway(here.settings) as other:
        got = asyncio.run(ask_all([one.url, other.url]))
    np.testing.assert_allclose(got, reference([f"text {number}" for number in range(16)]), atol=1e-6)


@pytest.mark.client("raw HTTP", "2,048 texts in one request; one more is refused")
def test_a_call_with_as_many_inputs_as_there_may_be(http: httpx2.Client, start_worker: StartWorker) -> None:
    start_worker()
    texts = [f"text {number}" for number in range(2048)]
    answer = http.post("/embeddings", json={"input": texts, "model": "dummy", "encoding_format": "base64"})
    assert answer.status_code == 200, answer.text
    rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer.json()["data"]]
    np.testing.assert_allclose(rows, reference(texts), atol=1e-6)
    assert answer.json()["usage"]["prompt_tokens"] == 4096
    refused = http.post("/embeddings", json={"input": [*texts, "one more"], "model": "dummy"})
    assert (refused.status_code, error_of(refused)["code"]) == (413, "too_many_inputs")


@pytest.mark.client("raw HTTP", "a text that is too long is told, or refused")
def test_a_text_that_was_cut_is_told_or_refused(http: httpx2.Client, start_worker: StartWorker) -> None:
    start_worker()
    texts = ["short", "word " * 300]
    answer = http.post("/v1/embeddings", json={"input": texts, "model": "dummy"}).json()
    assert answer["embedctl"] == {"truncated": [{"index": 1, "used": 256, "lost": 44}]}
    assert answer["usage"]["prompt_tokens"] == 257
    refused = http.post("/v1/embeddings", json={"input": texts, "model": "dummy", "long": "error"})
    assert (refused.status_code, error_of(refused)["code"]) == (400, "context_length_exceeded")
    assert error_of(refused)["message"].startswith("input[1]: ")
    at_tei = http.post("/embed", json={"inputs": texts})
    assert (at_tei.status_code, at_tei.json()["error_type"]) == (413, "Validation")
    assert len(http.post("/embed", json={"inputs": texts, "truncate": True}).json()) == 2


#: Fields of a request → the status, the code and the field of its refusal.
WRONG: list[tuple[dict[str, object], int, str, str]] = [
    ({"input": ["one"]}, 400, "missing_required_parameter", "model"),
    ({"input": ["one"], "model": 3}, 400, "invalid_type", "model"),
    ({"input": ["one"], "model": "dumy"}, 404, "model_not_found", "model"),
    ({"input": ["one"], "model": "no model"}, 404, "model_not_found", "model"),
    ({"model": "dummy"}, 400, "missing_required_parameter", "input"),
    ({"input": [], "model": "dummy"}, 400, "empty_input", "input"),
    ({"input": ["one", "  "], "model": "dummy"}, 400, "empty_input", "input"),
    ({"input": ["one", None], "model": "dummy"}, 400, "invalid_type", "input"),
    ({"input": "one", "model": "dummy", "dimensions": 0}, 400, "invalid_value", "dimensions"),
    ({"input": "one", "model": "dummy", "dimensions": 17}, 400, "invalid_value", "dimensions"),
    ({"input": "one", "model": "dummy", "encoding_format": "hex"}, 400, "invalid_value", "encoding_format"),
    ({"input": "one", "model": "dummy", "user": 1}, 400, "invalid_type", "user"),
    ({"input": "one", "model": "dummy", "long": ["x"]}, 400, "invalid_value", "long"),
    ({"input": "one", "model": "dummy", "input_type": "query"}, 400, "unsupported_parameter", "input_type"),
]


@pytest.mark.client("raw HTTP", "wrong requests, token ids among them, are refused with OpenAI's four fields")
def test_wrong_requests_are_refused_with_all_four_fields(http: httpx2.Client, start_worker: StartWorker) -> None:
    start_worker()
    for fields, status, code, param in WRONG:
        answer = http.post("/v1/embeddings", json=fields)
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), fields
        assert error["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"].startswith("req_")
    tokens = http.post("/v1/embeddings", json={"input": [[101, 7592]], "model": "dummy"})
    assert "check_embedding_ctx_length=False" in error_of(tokens)["message"]
    for body in (b"", b"{", b'{"input": "\xff"}', b'{"input": "\\ud800"}', b"[" * 100_000, b"[]", b'"one"', b"NaN"):
        answer = http.post("/v1/embeddings", content=body)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json"), body[:20]
    assert (http.get("/v1/embeddings").status_code, http.get("/v1/embeddings").headers["allow"]) == (
        405,
        "POST",
    )
    assert error_of(http.get("/v1/chat"))["code"] == "not_found"
    assert http.get("/v1/models/dumy").status_code == 404


@pytest.mark.client(
    "raw HTTP",
    "TEI's `/embed`, `/embed_sparse`, `/`, `/info`, HF Infinity's `/predict` with `x-compute-time`, infinity's paths",
)
def test_the_calls_of_tei_infinity_and_hf_infinity(http: httpx2.Client, start_worker: StartWorker) -> None:
    start_worker()
    for path in ("/embed", "/", "/predict"):
        answer = http.post(path, json={"inputs": TEXTS})
        np.testing.assert_allclose(answer.json(), reference(TEXTS), atol=1e-6)
        assert float(answer.headers["x-compute-time"]) >= 0
    left, right = (
        http.post("/embed", json={"inputs": "first " * 300 + "last", "truncate": True, "truncation_direction": side})
        for side in ("Left", "Right")
    )
    assert left.json() != right.json()
    raw = http.post("/embed", json={"inputs": TEXTS[0], "normalize": False, "prompt_name": None})
    assert np.linalg.norm(raw.json()) != pytest.approx(1, abs=1e-3)
    many = http.post("/embed_sparse", json={"inputs": ["red green red", *["blue"] * 40], "truncate": True})
    assert float(many.headers["x-compute-time"]) >= 0
    counts = [sorted(round(np.expm1(pair["value"])) for pair in row) for row in many.json()]
    assert counts == [[1, 2], *[[1]] * 40], "the dummy's weights are ln(1 + how often a word occurs)"
    assert (one := http.post("/embed_sparse", json={"inputs": "blue"}).json()) == many.json()[-1:]
    assert isinstance(one[0][0]["index"], int)
    facts = http.get("/info").json()
    assert facts["model_type"] == {"embedding": {"pooling": None}}  # no files say it of the dummy
    assert (facts["model_id"], facts["max_input_length"], facts["model_dtype"]) == ("dummy", 256, "float32")
    assert (http.head("/health").status_code, http.head("/health").content) == (200, b"")
    for path in ("/health", "/v1/health", "/ready"):
        assert http.get(path).status_code == 200
    assert [(each["id"], each["embedctl"]["outputs"]) for each in http.get("/models").json()["data"]] == [
        ("dummy", ["dense", "sparse", "multi"])
    ]
    refused = [
        (http.post("/embed", json=fields), status, kind)
        for fields, status, kind in (
            ({"inputs": []}, 400, "Empty"),
            ({"inputs": ["a"] * 2049}, 413, "Validation"),
            ({"inputs": [1, 2]}, 422, "Validation"),
            ({"inputs": "a", "prompt_name": ""}, 422, "Validation"),
            ({"inputs": "a", "truncate": "yes"}, 422, "Validation"),
            ({"inputs": "a", "truncation_direction": "up"}, 422, "Validation"),
        )
    ]
    refused += [
        (http.post("/embed_sparse", json=fields), status, "Validation")
        for fields, status in (({"inputs": "a", "normalize": True}, 422), ({"inputs": "word " * 300}, 413))
    ]
    for answer, status, kind in refused:
        assert (answer.status_code, answer.json()["error_type"]) == (status, kind), answer.text
        assert set(answer.json()) == {"error", "error_type"}


@pytest.mark.client("raw HTTP", "vLLM's `/pooling`; infinity's `/embeddings` of a model with multi-vectors alone")
def test_the_multi_vectors_of_vllm_and_infinity(here: Here, http: httpx2.Client) -> None:
    here.start_worker()
    job = enqueue_embeddings(TEXTS, vectors="multi", settings=here.settings)
    job.wait(timeout=60)
    expected = [record.vectors for record in job.multi()]
    assert [len(vectors) for vectors in expected] == [1, 2, 3]
    asked = {"model": "dummy", "input": TEXTS, "task": "token_embed"}
    for fields in (asked, {"input": TEXTS, "encoding_format": "base64"}):
        answer = http.post("/pooling", json=fields).json()
        assert (answer["object"], answer["model"], answer["usage"]["total_tokens"]) == ("list", "dummy", 6)
        assert [(each["object"], each["index"]) for each in answer["data"]] == [("pooling", at) for at in range(3)]
        for each, vectors in zip(answer["data"], expected, strict=True):
            numbers = each["data"]
            if isinstance(numbers, str):
                numbers = np.frombuffer(base64.b64decode(numbers), "<f4").reshape(vectors.shape)
            np.testing.assert_allclose(numbers, vectors, atol=1e-6)
    one_each = http.post("/pooling", json={**asked, "task": "embed"}).json()["data"]
    np.testing.assert_allclose([each["data"] for each in one_each], reference(TEXTS), atol=1e-6)
    long = "first " * 300 + "last"
    cut, left, many = (
        http.post("/pooling", json={"truncate_prompt_tokens": -1, **fields}).json()
        for fields in (
            {"input": long},
            {"input": long, "truncation_side": "left"},
            {"input": ["word " * 256] * 100},  # several parts, each of some vectors
        )
    )
    assert [len(each["data"][0]["data"]) for each in (cut, left)] == [256, 256]
    assert cut["data"] != left["data"]
    assert cut["embedctl"] == {"truncated": [{"index": 0, "used": 256, "lost": 45}]}
    assert {(len(each["data"]), str(each["data"][255])) for each in many["data"]} == {
        (256, str(many["data"][0]["data"][0]))
    }
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"input": long}, "context_length_exceeded", "input"),
        ({"task": "token_classify"}, "invalid_value", "task"),
        ({"task": ["embed"]}, "invalid_value", "task"),
        ({"truncate_prompt_tokens": 16}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncation_side": "up"}, "invalid_value", "truncation_side"),
        ({"dimensions": 4}, "unsupported_parameter", "dimensions"),
        ({"prompt_name": ""}, "invalid_value", "prompt_name"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"model": 7}, "invalid_type", "model"),
        ({"input": [[1]]}, "invalid_type", "input"),
    ]
    for fields, code, param in wrong:
        refused = http.post("/pooling", json={"input": "a", **fields})
        assert (refused.status_code, error_of(refused)["code"], error_of(refused)["param"]) == (400, code, param)
    colbert = here.start_worker("colbert", model="colbert")
    eventually(lambda: http.get("/models/colbert").status_code == 200, what="the model's offer")
    nested = http.post("/embeddings", json={"model": "colbert", "input": TEXTS}).json()
    for each, vectors in zip(nested["data"], expected, strict=True):
        np.testing.assert_allclose(each["embedding"], vectors, atol=1e-6)
    assert colbert.stop() == 0


LONG = "word " * 300
#: Model, path, and what else is asked for → the field that is to blame, and the code. That the dummy has no prompts,
#: the worker alone knows; the rest is known before, unless there is another worker by then.
FOUND_BY_WORKERS: list[tuple[str, str, dict[str, object], str, str]] = [
    ("dummy", "/pooling", {"prompt_name": "query"}, "prompt_name", "invalid_value"),
    ("dummy", "/embed", {"prompt_name": "query"}, "prompt_name", "invalid_value"),
    ("dummy", "/embed_sparse", {"prompt_name": "query"}, "prompt_name", "invalid_value"),
    ("dummy", "/v1/embeddings", {"dimensions": 17}, "dimensions", "invalid_value"),
    ("dummy", "/embed", {"dimensions": 17}, "dimensions", "invalid_value"),
    ("dummy", "/v1/embeddings", {"input": ["a", LONG], "long": "error"}, "input", "context_length_exceeded"),
    ("dummy", "/pooling", {"input": ["a", LONG]}, "input", "context_length_exceeded"),
    ("dummy", "/embed", {"inputs": ["a", LONG]}, "input", "context_length_exceeded"),
    ("colbert", "/pooling", {"task": "embed"}, "model", "output_not_given"),
    ("colbert", "/v1/embeddings", {"dimensions": 4}, "dimensions", "invalid_value"),
    ("colbert", "/v1/embeddings", {"long": "mean"}, "long", "invalid_value"),
]
AT_TEI = {"context_length_exceeded": 413, "output_not_given": 424, "invalid_value": 422}


@pytest.mark.parametrize("known_before", [True, False])
def test_no_fault_of_a_request_that_a_worker_finds_is_the_servers(
    here: Here, http: httpx2.Client, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, *, known_before: bool
) -> None:
    here.start_worker()
    here.start_worker("colbert", model="colbert")
    eventually(lambda: http.get("/models/colbert").status_code == 200, what="the model's offer")
    if not known_before:
        monkeypatch.setattr(common, "check_sizes", lambda *_: None)
        monkeypatch.setattr(enqueue, "check_against_workers", lambda *_: None)
    for model, path, asked, param, code in FOUND_BY_WORKERS if known_before else FOUND_BY_WORKERS[:-2]:
        is_tei = path.startswith("/embed")
        refused = http.post(path, json={"inputs": "a", **asked} if is_tei else {"model": model, "input": "a", **asked})
        if is_tei:
            assert (refused.status_code, refused.json()["error_type"]) == (AT_TEI[code], "Validation"), refused.text
            continue
        error = error_of(refused)
        found = refused.status_code, error["type"], error["param"], error["code"]
        assert found == (400, "invalid_request_error", param, code), refused.text
        assert error["message"].startswith("input[1]: ") == (param == "input")
    file = upload(client, lines_of(["a", "b"], dimensions=17))
    batch = ended(client, create(client, file).id)
    if known_before:
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [each.code for each in batch.errors.data] == ["invalid_value"]
    else:
        answers = rows_in(client, batch.error_file_id)
        told = [
            (each["status_code"], each["body"]["error"]["param"])
            for row in answers.values()
            for each in [row["response"]]
        ]
        assert told == [(400, "dimensions")] * 2


@pytest.mark.client("huggingface_hub", "`InferenceClient.feature_extraction`, with and without `/embed`")
def test_the_client_of_hugging_face(gateway: Running, start_worker: StartWorker) -> None:
    hub = need("huggingface_hub")
    start_worker()
    for path in ("", "/embed"):
        got = hub.InferenceClient(model=gateway.url + path).feature_extraction("two words", truncate=True)
        np.testing.assert_allclose(got, reference(["two words"]), atol=1e-6)


def test_nobody_serves_and_redis_is_away(here: Here, own_redis: RedisServer) -> None:
    apart = here.settings.replace(redis_url=own_redis.url)
    with running_gateway(apart) as gateway, gateway.client() as client:
        none = client.post("/v1/embeddings", json={"input": "one", "model": "dummy"})
        assert (none.status_code, error_of(none)["code"]) == (503, "model_unavailable")
        assert client.post("/v1/embeddings", json={"input": "one", "model": "other"}).status_code == 404
        assert (client.get("/ready").status_code, client.get("/health").status_code) == (503, 200)
        with redis.Redis.from_url(own_redis.url) as raw:
            raw.config_set("maxmemory", 1)
        full = error_of(client.post("/v1/embeddings", json={"input": "one", "model": "dummy"}))
        assert full["code"] == "broker_full"
        assert " of 1 bytes, and takes nothing more" in full["message"]
        own_redis.stop()
        away = client.post("/v1/embeddings", json={"input": "one", "model": "dummy"})
        assert (away.status_code, error_of(away)["type"]) == (503, "server_error")
        assert 0 < int(away.headers["retry-after"]) <= 120
        assert client.post("/embed", json={"inputs": "one"}).json()["error_type"] == "Unhealthy"
        assert (client.get("/ready").status_code, client.get("/health").status_code) == (503, 200)


def test_a_redis_that_hangs_is_told_soon(own_redis: RedisServer, settings: Settings) -> None:
    assert own_redis.process is not None
    with running_gateway(settings.replace(redis_url=own_redis.url)) as gateway, gateway.client() as client:
        own_redis.process.send_signal(signal.SIGSTOP)
        try:
            for answer in (client.get("/ready"), client.post("/embed", json={"inputs": "one"})):
                assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
            assert client.get("/health").status_code == 200
        finally:
            own_redis.process.send_signal(signal.SIGCONT)
        eventually(lambda: "serves" in client.get("/ready").text, what="Redis' answer")


def test_what_is_in_flight_at_the_end_is_answered(here: Here) -> None:
    here.start_worker("slow")
    asked = {"input": [f"{'word ' * 50} {number}" for number in range(8)], "model": "dummy"}
    with ThreadPoolExecutor() as pool:
        with running_gateway(here.settings) as gateway:
            answer = pool.submit(httpx2.post, f"{gateway.url}/v1/embeddings", json=asked, timeout=60)
            eventually(lambda: jobs_left(here.broker) or answer.done())
        assert len(answer.result().json()["data"]) == 8


def test_a_caller_who_goes_away_cancels_its_records(here: Here, gateway: Running) -> None:
    here.start_worker("slow")
    texts = [f"{'word ' * 50} {number}" for number in range(500)]  # minutes of work
    with gateway.connect() as connection:
        connection.sendall(request_bytes("/v1/embeddings", {"input": texts, "model": "dummy"}))
        eventually(lambda: jobs_left(here.broker), what="the request's job")
    eventually(lambda: not jobs_left(here.broker), what="the end of the request's job")
    eventually(lambda: gateway.gateway.admission.requests == 0)
    assert gateway.gateway.admission.held == 0


def test_pages_of_other_sites_are_refused_without_keys(http: httpx2.Client) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}):
        assert http.get("/v1/models", headers=headers).status_code == 403
    assert http.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


def test_no_text_and_no_message_of_a_fault_stands_in_the_log(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fields: dict[str, str], _: object) -> None:
        raise RuntimeError(fields["input"])

    monkeypatch.setattr("embedctl_gateway.calls.openai.check_known", fail)
    with caplog.at_level(logging.DEBUG), running_gateway(settings) as gateway, gateway.client() as client:
        answer = client.post("/v1/embeddings", json={"input": "a secret text", "model": "dummy"})
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text + answer.text


def test_answers_are_as_described_and_counted(http: httpx2.Client, start_worker: StartWorker) -> None:
    start_worker()
    texts = ["short", "word " * 300]
    described = http.get("/openapi.json").json()
    for method, path, fields in (
        ("post", "/v1/embeddings", {"input": texts, "model": "dummy", "dimensions": None}),
        ("post", "/v1/embeddings", {"input": "one", "model": "dummy", "encoding_format": "base64"}),
        ("post", "/v1/embeddings", {"input": "one"}),
        ("get", "/v1/models", None),
        ("get", "/v1/models/{name}", None),
        ("post", "/pooling", {"input": texts, "truncate_prompt_tokens": -1}),
        ("post", "/pooling", {"input": "one", "model": "dummy", "task": "embed", "encoding_format": "base64"}),
        ("post", "/pooling", {"input": texts}),
        ("post", "/embed", {"inputs": texts, "truncate": True}),
        ("post", "/embed", {"inputs": texts}),
        ("get", "/info", None),
        ("post", "/predict", {"inputs": "one"}),
        ("get", "/health", None),
        ("get", "/ready", None),
    ):
        call = described["paths"][path][method]
        answer = http.request(method, path.format(name="dummy"), json=fields)
        schema = call["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {**schema, "components": described["components"]})
        if fields is not None and answer.status_code == 200:
            body = call["requestBody"]["content"]["application/json"]["schema"]
            jsonschema.validate(fields, {**body, "components": described["components"]})
    assert "default-src 'none'" in http.get("/docs").headers["content-security-policy"]
    metrics = http.get("/metrics").text
    documented = set(re.findall(r"^\| `(embedctl_gateway_\w+)` \| (\w+) \|", PAGE.read_text("utf-8"), re.MULTILINE))
    served = re.findall(r"^# TYPE (embedctl_gateway_\w+) (\w+)$", metrics, re.MULTILINE)
    assert documented == {(name, kind) for name, kind in served if not name.endswith("_created")}
    for line in (
        'embedctl_gateway_requests_total{path="/embeddings",status="200"} 2.0',
        'embedctl_gateway_requests_total{path="/embeddings",status="400"} 1.0',
        'embedctl_gateway_request_seconds_count{path="/embed"} 2.0',
        'embedctl_gateway_texts_total{model="dummy"} 9.0',
        "embedctl_gateway_in_flight 0.0",
        "embedctl_gateway_held_bytes 0.0",
    ):
        assert line in metrics, metrics


@pytest.fixture
def certificate(short_folder: Path) -> Path:
    """A certificate with its key for localhost, and beside it the authority's."""
    authority = trustme.CA()
    path = short_folder / "gateway.pem"
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    authority.cert_pem.write_to_path(str(path.with_name("ca.pem")))
    return path


@pytest.mark.client("raw HTTP", "keys and tenants, over TLS")
def test_keys_tenants_and_tls(here: Here, certificate: Path) -> None:
    here.start_worker("slow")
    keys = here.folder / "keys"
    key = add_key(keys, "alice", "search")
    guarded = here.settings.replace(gateway_keys_file=str(keys), gateway_tls_cert_file=str(certificate))
    trusted = ssl.create_default_context(cafile=certificate.with_name("ca.pem"))
    with running_gateway(guarded) as gateway:
        assert gateway.url.startswith("https://")
        with httpx2.Client(base_url=gateway.url, verify=trusted, timeout=60) as client:
            for path in ("/v1/models", "/info", "/v1/models/dummy"):
                assert client.get(path).status_code == 401
            for path in ("/v1/embeddings", "/embed", "/", "/predict"):
                refused = client.post(path, json={"inputs": "one"}, headers={"authorization": "Bearer wrong"})
                assert refused.status_code == 401
            assert error_of(client.post("/v1/embeddings"))["code"] == "invalid_api_key"
            assert [client.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
            client.headers["authorization"] = f"Bearer {key}"
            # Behind a proxy the name is another one, and pages of other sites have no key.
            assert client.get("/v1/models", headers={"host": "gateway.example"}).status_code == 200
            texts = [f"{'word ' * 50} {number}" for number in range(500)]  # minutes of work
            with ThreadPoolExecutor() as pool:
                asked = pool.submit(client.post, "/v1/embeddings", json={"input": texts, "model": "dummy"})
                eventually(lambda: jobs_left(here.broker), what="the request's job")
                (seen,) = here.broker.jobs.newest()
                here.broker.jobs.cancel(seen.id)
                ended = asked.result()
            assert (seen.tenant, seen.lane) == ("search", "interactive")
            assert (ended.status_code, error_of(ended)["code"]) == (503, "stopped")
    wrong = here.settings.replace(gateway_tls_cert_file=str(here.folder / "none.pem"))
    with pytest.raises(SettingsError, match="gateway_tls_cert_file"), running_gateway(wrong):
        pass


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["stopped", "Ctrl-C"])
def test_the_command_answers_and_ends(here: Here, number: int, status: int) -> None:
    with Forked(["gateway", "--address", "0"], here.environment, here.folder, DEVNULL) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        url = re.search(r"the gateway is at (http://127\.0\.0\.1:\d+)/v1 for everyone on this machine alone", said)
        assert url, said
        assert httpx2.get(f"{url[1]}/health", verify=NO_TLS).json() == {"status": "ok"}
        (batches,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        lower = min(os.getpriority(os.PRIO_PROCESS, process.pid) + 10, 19)
        eventually(lambda: os.getpriority(os.PRIO_PROCESS, batches) == lower, what="the process of batches gives way")
        assert os.getsid(batches) == batches  # Linux shares CPUs among sessions first
        process.send_signal(number)
        assert process.wait(60) == status


def test_a_gateway_that_is_stopped_as_it_starts_ends(here: Here) -> None:
    stopped = DieAt(("embedctl_gateway.serving.serve:_Server", "run", 1), "before", signal.SIGTERM)
    with Forked(["gateway", "--address", "0"], here.environment, None, DEVNULL, prepare=stopped) as process:
        assert process.wait(60) == 0


def test_a_handshake_that_nobody_begins_holds_no_place(
    here: Here, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "embedctl_gateway.serving.connections.TimedProtocol"
    monkeypatch.setattr(f"{limits}.max_connections", 2)
    trusted = ssl.create_default_context(cafile=certificate.with_name("ca.pem"))
    settings = here.settings.replace(gateway_tls_cert_file=str(certificate))
    with running_gateway(settings) as gateway, ExitStack() as opened:
        silent = [opened.enter_context(gateway.connect()) for _ in range(3)]
        with suppress(ConnectionError):
            assert silent[0].recv(1) == b""
        assert httpx2.get(f"https://localhost:{gateway.port}/health", verify=trusted).status_code == 200
        monkeypatch.setattr(f"{limits}.timeout_s", 0.2)
        with suppress(ConnectionError):
            assert opened.enter_context(gateway.connect()).recv(1) == b""
