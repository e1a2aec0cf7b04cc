"""The proxy that stands for a network: what is slow arrives whole, in order and late.

Times have lower bounds only, which a busy machine keeps as well.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.proxy import Proxy

PAYLOAD = bytes(range(256)) * 2048  # 512 KiB: more than the proxy holds on its way


@pytest.fixture
def echo_port() -> Iterator[int]:
    """A server that sends back what it is sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

        def echo(connection: socket.socket) -> None:
            with connection:
                while data := connection.recv(65536):
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(echo_port: int) -> Iterator[Proxy]:
    proxy = Proxy(echo_port)
    proxy.start()
    yield proxy
    proxy.stop()


def round_trip(proxy: Proxy, payload: bytes) -> tuple[bytes, float]:
    """What comes back, and after how long (seconds)."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client:
        sender = threading.Thread(target=client.sendall, args=(payload,))
        sender.start()
        received = b""
        while len(received) < len(payload):
            received += client.recv(65536)
        sender.join()
    return received, time.monotonic() - began


def test_everything_arrives_in_order_whatever_the_link_is_like(proxy: Proxy) -> None:
    assert round_trip(proxy, PAYLOAD)[0] == PAYLOAD
    proxy.delay_s, proxy.rate = 0.05, 2e6
    assert round_trip(proxy, PAYLOAD)[0] == PAYLOAD
    proxy.delay_s, proxy.rate = 0.0, None
    assert round_trip(proxy, PAYLOAD)[0] == PAYLOAD


def test_a_delayed_link_takes_its_time_in_both_directions(proxy: Proxy) -> None:
    proxy.delay_s = 0.2
    assert round_trip(proxy, b"a")[1] >= 0.4


def test_the_rate_is_shared_by_all_connections(proxy: Proxy) -> None:
    proxy.rate = 512 * 1024
    began = time.monotonic()
    threads = [threading.Thread(target=round_trip, args=(proxy, PAYLOAD[: len(PAYLOAD) // 2])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.9
