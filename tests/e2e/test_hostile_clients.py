"""Clients who mean harm, over bare sockets: they hold neither another client's place nor its time."""

from __future__ import annotations

import socket
import threading
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]  # what connections write to
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx2
import openai
import pytest
import redis

from embedctl.store.stored_files import StoredFile
from embedctl_gateway.calls.common import PART_BYTES
from embedctl_gateway.calls.objects import file_object
from embedctl_gateway.serving.connections import MAX_LINES, Crowd
from tests.support.batches import client_of, create, ended, lines_of, upload
from tests.support.gateway import Running, gateway_with_keys, request_bytes, running_gateway
from tests.support.here import Here
from tests.support.limits import limited
from tests.support.waiting import eventually

FORM = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'


def status_of(connection: socket.socket) -> bytes:
    return connection.recv(12).removeprefix(b"HTTP/1.1 ")


def test_who_sends_a_body_slowly_has_no_place(here: Here) -> None:
    here.start_worker()
    with running_gateway(limited(here.settings, gateway_in_flight=1)) as gateway, gateway.connect() as slow:
        slow.sendall(request_bytes("/v1/embeddings", {"input": "one", "model": "dummy"})[:-5])
        eventually(lambda: gateway.gateway.admission.held, what="the begin of the body")
        with gateway.client() as client:
            assert client.post("/v1/embeddings", json={"input": "one", "model": "dummy"}).status_code == 200


def test_nothing_endless_comes_behind_a_form(gateway: Running) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    with gateway.connect() as connection:
        connection.sendall(b"%btransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (head, len(FORM), FORM))
        with suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")
        assert status_of(connection) == b"400"


def test_who_reads_much_holds_the_event_loop_for_a_part_at_a_time(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 24 * 1024
    written: list[int] = []
    write = _SelectorSocketTransport.write

    def noted(transport: Any, piece: bytes) -> None:
        written.append(len(piece))
        write(transport, piece)

    with client_of(gateway) as client:
        file_id = upload(client, data)
        monkeypatch.setattr(_SelectorSocketTransport, "write", noted)
        assert client.files.content(file_id).content == data
    assert max(written) == PART_BYTES


@pytest.mark.parametrize(("lines", "status"), [(MAX_LINES - 2, b"200"), (MAX_LINES + 2, b"400")])
def test_many_short_headers_are_not_parsed(gateway: Running, lines: int, status: bytes) -> None:
    asked = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * (lines - 1) + b"\r\n"
    with gateway.connect() as connection:
        connection.sendall(asked)
        assert status_of(connection) == status


def test_a_tenant_with_all_connections_loses_one_to_a_newcomer(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.serving.connections.TimedProtocol.max_connections", 8)
    asked = b"GET /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n\r\n"
    with (
        gateway_with_keys(here.settings, here.folder, "bob", "eve") as (gateway, (mine, theirs)),
        ExitStack() as opened,
    ):
        eve = [opened.enter_context(gateway.connect()) for _ in range(8)]
        for each in eve:
            each.sendall(asked % theirs.encode())
            assert status_of(each) == b"200"
        with gateway.connect() as bob:
            bob.sendall(asked % mine.encode())
            assert status_of(bob) == b"200"


def test_a_newcomer_with_a_key_waits_for_no_strangers_at_its_address(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_turn = Crowd.has_turn
    monkeypatch.setattr(Crowd, "has_turn", lambda crowd, one: bool(one.tenant) and has_turn(crowd, one))
    asked = b"GET /v1/files HTTP/1.1\r\nhost: localhost\r\nAuthorization: bearer %b\r\n\r\n"
    with (
        gateway_with_keys(here.settings, here.folder, "bob") as (gateway, (key,)),
        gateway.connect() as stranger,
        gateway.connect() as bob,
    ):
        stranger.sendall(asked % b"ec-wrong")
        bob.sendall(asked % key.encode())
        assert status_of(bob) == b"200"
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            status_of(stranger)


def test_a_long_list_is_made_aside(client: openai.OpenAI, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(client, lines_of(["one"]))
    began, over = threading.Event(), threading.Event()

    def shown(file: StoredFile) -> dict[str, Any]:
        began.set()
        assert over.wait(60)
        return file_object(file)

    monkeypatch.setattr("embedctl_gateway.calls.files.file_object", shown)
    with ThreadPoolExecutor() as pool:
        listed = pool.submit(lambda: list(client.files.list()))
        try:
            assert began.wait(60)
            assert http.get("/health").status_code == 200
        finally:
            over.set()
        assert len(listed.result()) == 1


def test_a_range_of_one_byte_costs_redis_no_more(client: openai.OpenAI, http: httpx2.Client, raw: redis.Redis) -> None:
    url = f"/v1/files/{upload(client, bytes(range(256)) * 4096)}/content"
    before = raw.info("stats")["total_net_output_bytes"]
    assert http.get(url, headers={"range": "bytes=1000-1000"}).content == bytes([1000 % 256])
    assert raw.info("stats")["total_net_output_bytes"] - before < 100_000


#: What a line of a batch may not be → the code of its refusal.
LINES: dict[str, tuple[bytes, str]] = {
    "endless": (b'{"custom_id":"a' + b"x" * 8 * 1024 * 1024, "request_too_large"),
    "of many values": (b'{"custom_id":"a","body":{"input":[' + b"1," * 100_000 + b"1]}}", "too_many_inputs"),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_line_that_takes_long_to_parse_is_refused_unparsed(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def parse(line: bytes, where: str) -> None:
        assert len(line) < 100_000, where

    monkeypatch.setattr("embedctl.corpus.batch.json_object", parse)
    line, code = LINES[kind]
    batch = ended(client, create(client, upload(client, lines_of(["one"]) + line)).id)
    assert batch.errors is not None
    assert [(each.code, each.line) for each in batch.errors.data or []] == [(code, 2)]


def test_large_batches_of_a_tenant_hold_up_no_other_ones(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a gateway's threads for large batches are busy with one tenant's."""
    over = threading.Event()
    monkeypatch.setattr("embedctl_gateway.batches.runner._SMALL_BYTES", 1000)
    checks: list[str] = []

    def lines(parts: Iterator[bytes], longest: int) -> Iterator[bytes]:
        data = b"".join(parts)
        checks.append("large" if len(data) > 1000 else "small")
        if len(data) > 1000:
            assert over.wait(60)
        yield data

    monkeypatch.setattr("embedctl_gateway.batches.requests.requests_of", lines)
    with (
        gateway_with_keys(here.settings, here.folder, "bob", "eve") as (gateway, (mine, theirs)),
        ExitStack() as opened,
    ):
        opened.callback(over.set)
        eve, bob = (opened.enter_context(client_of(gateway, key)) for key in (theirs, mine))
        large = upload(eve, lines_of(["word " * 300]))
        for _ in range(5):
            create(eve, large)
        eventually(lambda: len(checks) == 3, what="three large batches")
        small = create(bob, upload(bob, b"no request\n"))
        assert ended(bob, small.id).status == "failed"
        assert checks.count("large") == 3
