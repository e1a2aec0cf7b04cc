"""A gateway in a thread of the test, and bare connections to it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx2

from embedctl_config.settings import Settings
from embedctl_gateway.calls import Gateway
from embedctl_gateway.serve import listening, make_server, url_of
from tests.support.waiting import eventually


class Running(NamedTuple):
    """A gateway that answers."""

    url: str
    port: int
    gateway: Gateway

    def client(self, key: str = "") -> httpx2.Client:
        """A client that does not retry."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60)

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextmanager
def running_gateway(settings: Settings, gateway: Gateway | None = None) -> Iterator[Running]:
    """A gateway on a free port, until the end of the block."""
    settings = settings.replace(gateway_port=0)
    gateway = gateway or Gateway.of(settings)
    server = make_server(settings, gateway)
    with listening(settings) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            eventually(lambda: server.started, what="the gateway's start")
            yield Running(url_of(settings, listener), listener.getsockname()[1], gateway)
        finally:
            server.should_exit = True
            thread.join()


def request_bytes(path: str, fields: Mapping[str, Any], **headers: str) -> bytes:
    """A POST as it is on the wire."""
    body = json.dumps(fields).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
