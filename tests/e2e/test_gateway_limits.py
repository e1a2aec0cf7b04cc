"""What a gateway takes of a client: how many requests, of which size, for how long, over how many connections."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count, cycle, repeat
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from embedctl_config.settings import Settings
from embedctl_config.tenants import DEFAULT, RATES, TenantEntry
from embedctl_gateway.http.bodies import SMALL_BYTES, fields_of
from embedctl_gateway.serving.connections import TimedProtocol
from tests.support.batches import client_of
from tests.support.gateway import (
    NO_TLS,
    Running,
    error_of,
    gateway_with_keys,
    jobs_left,
    request_bytes,
    running_gateway,
)
from tests.support.here import Here
from tests.support.limits import limited
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.workers import StartWorker


def embed_until_refused(*clients: openai.OpenAI) -> tuple[int, openai.RateLimitError]:
    """Ask for one text through one client after the other; returns how often there was a vector, and the refusal."""
    for number, client in enumerate(cycle(clients)):
        try:
            client.with_options(max_retries=0).embeddings.create(input="one", model="dummy")
        except openai.RateLimitError as refused:
            return number, refused
    raise AssertionError


@pytest.mark.parametrize("rate", RATES)
def test_two_gateways_keep_a_tenants_rate_and_clients_wait_for_it(here: Here, gateway: Running, rate: str) -> None:
    here.start_worker()
    here.broker.quotas.state(DEFAULT, TenantEntry(**{rate: 5}), by="w", since_ms=1)
    with running_gateway(here.settings) as second, client_of(gateway) as one, client_of(second) as other:
        began = time.monotonic()
        count, refused = embed_until_refused(one, other)
        assert 5 <= count <= 5 + 5 * (time.monotonic() - began)
        headers = refused.response.headers
        assert 0 < int(headers["retry-after-ms"]) <= 200
        assert headers["retry-after"] == "1"
        assert headers.get("x-ratelimit-limit-requests") == ("5" if rate == "max_requests_s" else None)
        assert f"({rate})" in str(refused)
        for _ in range(5):
            assert other.with_options(max_retries=20).embeddings.create(input="one", model="dummy").data


def test_more_than_the_limit_is_asked_to_come_again(here: Here) -> None:
    here.start_worker("slow")
    long = {"input": [f"{'word ' * 50} {number}" for number in range(500)], "model": "dummy"}
    with running_gateway(limited(here.settings, gateway_in_flight=1)) as gateway, gateway.connect() as busy:
        busy.sendall(request_bytes("/v1/embeddings", long))
        eventually(lambda: gateway.gateway.admission.requests == 1)
        with gateway.client() as client:
            refused = client.post("/v1/embeddings", json={"input": "one", "model": "dummy"})
            assert (refused.status_code, error_of(refused)["type"]) == (429, "rate_limit_error")
            assert 0 < int(refused.headers["retry-after"]) <= 120
            assert client.post("/embed", json={"inputs": "one"}).json()["error_type"] == "Overloaded"
            assert client.get("/health").status_code == 200
        with running_gateway(limited(here.settings, gateway_in_flight=1)) as second, second.client() as client:
            assert client.post("/embed", json={"inputs": "one"}).json()["error_type"] == "Overloaded"
            busy.close()
            eventually(lambda: client.post("/embed", json={"inputs": "one"}).status_code == 200)


def test_a_request_that_takes_too_long_ends(here: Here) -> None:
    here.start_worker("slow")
    long = {"input": [f"{'word ' * 50} {number}" for number in range(500)], "model": "dummy"}
    with running_gateway(here.settings.replace(gateway_timeout_s=0.5)) as gateway, gateway.client() as client:
        late = client.post("/v1/embeddings", json=long)
        assert (late.status_code, error_of(late)["code"]) == (503, "timeout")
        eventually(lambda: not jobs_left(here.broker), what="the end of the request's job")


def test_a_connection_without_a_request_is_closed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.serving.connections.TimedProtocol.timeout_s", 0.2)
    with running_gateway(settings) as running:
        for sent in (b"", b"POST /embed HTTP/1.1\r\nhost: lo"):
            with running.connect() as connection, suppress(ConnectionError):
                connection.sendall(sent)
                assert connection.recv(65536) == b""


def test_who_is_answered_sends_no_endless_body(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.serving.connections.TimedProtocol.timeout_s", 0.2)
    headers = b"host: elsewhere.example\r\ntransfer-encoding: chunked\r\n\r\n"
    with running_gateway(settings) as running:
        for call, status in ((b"GET /health", b"200"), (b"POST /nowhere", b"404"), (b"POST /v1/embeddings", b"403")):
            with running.connect() as connection:
                connection.sendall(call + b" HTTP/1.1\r\n" + headers)
                assert connection.recv(12) == b"HTTP/1.1 " + status, call
                with pytest.raises(ConnectionError):
                    any(map(connection.sendall, repeat(b"10000\r\n" + bytes(65536) + b"\r\n")))


def test_slow_and_large_requests_are_refused(settings: Settings) -> None:
    whole = request_bytes("/v1/embeddings", {"input": "one", "model": "dummy"})
    with running_gateway(settings, body_s=0.2) as running:
        for sent, status in (
            (whole[:-5], b"408"),  # a body that does not end
            (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 100_000, b"400"),
            (b"GET /" + b"x" * 100_000, b"400"),
            (b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n", b"413"),
            (b"no request\r\n\r\n", b"400"),
            (whole.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n"), b"400"),  # two lengths
        ):
            with running.connect() as connection:
                with suppress(ConnectionError):
                    connection.sendall(sent)
                assert connection.recv(12).removeprefix(b"HTTP/1.1 ") == status, sent[:50]
        eventually(lambda: running.gateway.admission.held == 0)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_body_that_is_broken_is_answered_once(
    settings: Settings, caplog: pytest.LogCaptureFixture, *, at_once: bool
) -> None:
    """Whether the call has been answered by then or not."""
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with running_gateway(settings) as gateway, gateway.connect() as connection:
        connection.sendall(head + b"no length\r\n" if at_once else head)
        got = connection.recv(12)
        if not at_once:
            connection.sendall(b"no length\r\n")
        got += b"".join(iter(lambda: connection.recv(65536), b""))
    assert got.startswith(b"HTTP/1.1 400" if at_once else b"HTTP/1.1 404")
    assert got.count(b"HTTP/1.1") == 1
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_there_are_not_endlessly_many_connections(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.serving.connections.TimedProtocol.max_connections", 1)
    with running_gateway(settings) as gateway, gateway.connect() as first:
        first.sendall(b"GET /v1/files HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert first.recv(65536).startswith(b"HTTP/1.1 200")
        with gateway.connect() as second, suppress(ConnectionError):
            assert second.recv(65536) == b""


def test_many_new_connections_hold_up_nobody(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_in, rounds = Counter[int](), count()
    look, made = threading.Event(), TimedProtocol.connection_made

    def connection_made(self: TimedProtocol, transport: asyncio.Transport) -> None:
        if not taken_in:
            look.wait(PATIENCE_S)
            go_round(self.loop)
        taken_in[at[0]] += 1
        made(self, transport)

    def go_round(loop: asyncio.AbstractEventLoop) -> None:
        at[0] = next(rounds)
        if taken_in.total() < 100:
            loop.call_soon(go_round, loop)

    at = [next(rounds)]
    monkeypatch.setattr(TimedProtocol, "connection_made", connection_made)
    with running_gateway(settings) as gateway, ExitStack() as opened:
        for _ in range(100):
            opened.enter_context(gateway.connect())
        look.set()
        eventually(lambda: taken_in.total() == 100, what="the connections")
        assert max(taken_in.values()) <= 17


def test_strangers_connections_keep_no_holder_of_a_key_out(
    settings: Settings, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedctl_gateway.serving.connections.TimedProtocol.max_connections", 3)
    with gateway_with_keys(settings, short_folder, "search") as (gateway, (key,)), ExitStack() as opened:
        asked = f"GET /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n".encode()
        for _ in range(3):
            opened.enter_context(gateway.connect())
        holder = opened.enter_context(gateway.connect())
        for _ in range(3):
            holder.sendall(asked)
            answer = b"".join(iter(lambda: holder.recv(1), b"}"))
            assert answer.startswith(b"HTTP/1.1 200")
            for _ in range(3):
                opened.enter_context(gateway.connect())


def test_a_body_of_unknown_length_is_bounded(gateway: Running, http: httpx2.Client) -> None:
    parts = (b'{"input": "' if at == 0 else b"x" * 1024 * 1024 for at in range(18))
    assert http.post("/v1/embeddings", content=parts).status_code == 413
    eventually(lambda: gateway.gateway.admission.held == 0)


def test_a_large_body_keeps_nobody_from_an_answer(
    gateway: Running, http: httpx2.Client, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker()
    began, over = threading.Event(), threading.Event()

    def read(body: bytes, longest: int) -> dict[str, Any]:
        if len(body) > SMALL_BYTES:
            began.set()
            assert over.wait(60)
        return fields_of(body, longest)

    monkeypatch.setattr("embedctl_gateway.calls.common.fields_of", read)
    large = {"input": ["word " * 100] * 200, "model": "dummy"}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx2.post, f"{gateway.url}/v1/embeddings", json=large, timeout=60, verify=NO_TLS)
        try:
            assert began.wait(60)
            assert http.get("/health").status_code == 200
            assert http.post("/v1/embeddings", json={"input": "one", "model": "dummy"}).status_code == 200
        finally:
            over.set()
        assert len(answer.result().json()["data"]) == 200
