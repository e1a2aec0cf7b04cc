"""What the operator's URL is told when batches end, read with the official client and with the standard's library."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
from openai.types import Batch

from embedctl_config.settings import Settings
from embedctl_gateway.batches import webhooks
from tests.support.batches import client_of, create, ended, lines_of, upload
from tests.support.gateway import NO_TLS, running_gateway
from tests.support.here import Here
from tests.support.packages import need
from tests.support.waiting import eventually

SECRET = "whsec_" + base64.b64encode(b"a secret of the test, of 34 bytes.").decode()


class Told:
    """The requests that came, and how the next ones are answered."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], str]] = []
        self.statuses: list[int] = []
        #: A request that begins while this is clear is not answered until it is set.
        self.answers = threading.Event()
        self.answers.set()


@contextmanager
def receiving(told: Told) -> Iterator[str]:
    """A receiver of webhooks; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            told.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
            told.answers.wait(60)
            self.send_response(told.statuses.pop(0) if told.statuses else 204)
            self.send_header("location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")  # type: ignore[attr-defined]  # an HTTPServer's
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/told?by=us"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(webhooks, "PAUSES_S", (0.1, 0.1, 0.1))
    monkeypatch.setattr(webhooks, "_LOOK_S", 0.05)
    return Told()


@pytest.fixture
def settings(settings: Settings, told: Told, short_folder: Path) -> Iterator[Settings]:
    secret = short_folder / "secret"
    secret.write_text(SECRET + "\n")
    with receiving(told) as url:
        receiver = {"gateway_webhook_url": url, "gateway_webhook_networks": "127.0.0.1"}
        yield settings.replace(gateway_webhook_secret_file=str(secret), **receiver)


def run(client: openai.OpenAI, data: bytes) -> Batch:
    return ended(client, create(client, upload(client, data)).id)


def events(told: Told) -> list[tuple[str, str]]:
    """The types of the events that came and their batches, as the official client reads them."""
    http = openai.DefaultHttpxClient(verify=NO_TLS)
    with openai.OpenAI(api_key="none", webhook_secret=SECRET, http_client=http) as client:
        read: list[Any] = [client.webhooks.unwrap(body, headers) for headers, body in told.requests]
    assert all(each.object == "event" for each in read)
    assert [headers["webhook-id"] for headers, _ in told.requests] == [each.id for each in read]
    return [(each.type, each.data.id) for each in read]


def is_quiet(raw: redis.Redis) -> bool:
    """Whether nothing is to be told."""
    return not raw.keys("embed:webhook*")


def test_ends_of_batches_are_told(here: Here, told: Told) -> None:
    here.start_worker()
    with running_gateway(here.settings) as gateway, client_of(gateway) as client:
        good, bad = run(client, lines_of(["one", ""])), run(client, b"{")
        cancelled = create(client, upload(client, lines_of(["one"]).replace(b"dummy", b"nobody-serves-it")))
        client.batches.cancel(cancelled.id)
        ended(client, cancelled.id)
        eventually(lambda: len(told.requests) == 3 and is_quiet(here.raw), what="three webhooks")
        assert set(events(told)) == {
            ("batch.completed", good.id),
            ("batch.failed", bad.id),
            ("batch.cancelled", cancelled.id),
        }
        assert "texts" not in told.requests[0][1]
        library = need("standardwebhooks")
        standard = library.Webhook(SECRET)
        for headers, body in told.requests:
            assert standard.verify(body, headers)["id"] == headers["webhook-id"]
            for name in ("webhook-id", "webhook-timestamp"):  # a replay can have no other
                with pytest.raises(library.WebhookVerificationError):
                    standard.verify(body, {**headers, name: str(int(headers["webhook-timestamp"]) + 1)})
        with gateway.client() as raw:
            assert 'embedctl_gateway_webhooks_total{result="delivered"} 3.0' in raw.get("/metrics").text


def test_a_receiver_that_fails_is_told_again_with_the_same_id_until_it_is_given_up(
    here: Here, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    here.start_worker()
    with running_gateway(here.settings) as gateway, client_of(gateway) as client:
        told.statuses = [500, 302, 404]  # a redirect is a failure: the operator has not named where it leads
        batch = run(client, lines_of(["one"]))
        eventually(lambda: len(told.requests) == 4 and is_quiet(here.raw), what="the fourth try")
        assert events(told) == [("batch.completed", batch.id)] * 4
        assert len({(headers["webhook-id"], body) for headers, body in told.requests}) == 1
        told.statuses = [503] * 10
        batch = run(client, lines_of(["one"]))
        eventually(lambda: len(told.requests) == 8 and is_quiet(here.raw), what="the last try")
    assert f"the webhook of {batch.id} is given up after 4 tries: status 503" in caplog.text
    assert SECRET not in caplog.text


def test_a_try_that_takes_long_holds_up_no_other(here: Here, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "_TRY_S", 600.0)
    here.start_worker()
    with running_gateway(here.settings) as gateway, client_of(gateway) as client:
        told.answers.clear()
        try:
            slow = run(client, lines_of(["one"]))
            eventually(lambda: len(told.requests) == 1, what="the first event")
            quick = run(client, lines_of(["two"]))
            eventually(lambda: len(told.requests) == 2, what="the second event, while the first is not answered")
        finally:
            told.answers.set()
        eventually(lambda: is_quiet(here.raw), what="both answers")
    assert events(told) == [("batch.completed", slow.id), ("batch.completed", quick.id)]


def test_a_receiver_in_a_network_of_ones_own_is_told_nothing_unless_it_is_named(
    here: Here, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    here.start_worker()
    elsewhere = here.settings.replace(gateway_webhook_networks="10.0.0.0/8")
    named = elsewhere.replace(gateway_webhook_url=here.settings.gateway_webhook_url.replace("127.0.0.1", "localhost"))
    with running_gateway(named) as gateway, client_of(gateway) as client:
        batch = run(client, lines_of(["one"]))
        eventually(lambda: is_quiet(here.raw), what="the last try")
    assert f"the webhook of {batch.id} is given up after 4 tries: localhost leads to 127.0.0.1" in caplog.text
    assert told.requests == []


@pytest.mark.slow
def test_another_gateway_tells_what_one_could_not(here: Here, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one dies between its try and its note."""
    monkeypatch.setattr(webhooks, "_LEASE_S", 0.5)
    here.start_worker()
    with monkeypatch.context() as patched:
        patched.setattr("embedctl.store.batches.EventStore.note", lambda *_: None)
        with running_gateway(here.settings) as gateway, client_of(gateway) as client:
            batch = run(client, lines_of(["one"]))
            eventually(lambda: told.requests, what="the first try")
    assert not is_quiet(here.raw)
    with running_gateway(here.settings):
        eventually(lambda: is_quiet(here.raw), what="the second gateway's try")
    assert set(events(told)) == {("batch.completed", batch.id)}
    assert len({headers["webhook-id"] for headers, _ in told.requests}) == 1
