"""A gateway in a thread of the test, and bare connections to it."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL
from typing import IO, Any, NamedTuple

import httpx2

from embedctl.queueing.broker import Broker
from embedctl_config.settings import Settings
from embedctl_gateway.access.key_file import add_key
from embedctl_gateway.calls.common import Gateway
from embedctl_gateway.serving.serve import listening, make_server
from tests.support.forked import Forked
from tests.support.waiting import PATIENCE_S, eventually

#: For clients of a gateway without TLS: to read the system's certificates takes longer than most requests.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Running(NamedTuple):
    """A gateway that answers."""

    url: str
    port: int
    gateway: Gateway

    def client(self, key: str = "") -> httpx2.Client:
        """A client that does not retry."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60, verify=NO_TLS)

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)


@contextmanager
def running_gateway(settings: Settings, *, hardware: str = "auto", body_s: float | None = None) -> Iterator[Running]:
    """A gateway on a free port, until the end of the block.

    Args:
        hardware: the class whose workers it takes; by default, any live worker will do.
        body_s: how long a body may take (seconds); None is the product's own bound.
    """
    settings = settings.replace(gateway_address="0", hardware=hardware)
    gateway = Gateway(settings) if body_s is None else Gateway(settings, body_s=body_s)
    server = make_server(settings, gateway)
    listener, url = listening(settings)
    with listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            eventually(lambda: server.started, what="the gateway's start")
            yield Running(url, listener.getsockname()[1], gateway)
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def gateway_with_keys(
    settings: Settings, folder: Path, *tenants: str, body_s: float | None = None
) -> Iterator[tuple[Running, list[str]]]:
    """A gateway that lets in only who has a key, and a key of each tenant; they are kept in a folder."""
    path = folder / "keys"
    keys = [add_key(path, tenant, tenant) for tenant in tenants]
    with running_gateway(settings.replace(gateway_keys_file=str(path)), body_s=body_s) as running:
        yield running, keys


@contextmanager
def killed_gateway(environment: Mapping[str, str], prepare: Callable[[], None]) -> Iterator[tuple[str, IO[str]]]:
    """A gateway in a process of its own, which runs `prepare` first, until it is killed at the end of the block.

    Yields:
        Its URL, and what it says after that.
    """
    with Forked(["gateway", "--address", "0"], environment, None, DEVNULL, prepare=prepare) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+", said)
            assert url, said
            yield url[0], process.stderr
        finally:
            process.kill()


def request_bytes(path: str, fields: Mapping[str, Any], **headers: str) -> bytes:
    """A POST as it is on the wire."""
    body = json.dumps(fields).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def jobs_left(broker: Broker) -> list[str]:
    return [job.id for job in broker.jobs.newest()]


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """An error of OpenAI's form, all of whose fields are there."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
