"""The address of the gateway."""

from __future__ import annotations

import socket

import pytest

from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings
from embedctl_gateway.serving.serve import listening


@pytest.mark.parametrize(("address", "host"), [("localhost", "localhost"), ("::1", "[::1]")])
def test_the_url_is_one_that_can_be_opened(address: str, host: str) -> None:
    listener, url = listening(Settings(gateway_address=f"{host}:0"))
    with listener:
        port = listener.getsockname()[1]
        assert url == f"http://{host}:{port}"
        with socket.create_connection((address, port), timeout=30):
            pass


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_every_address_means_both_families(address: str) -> None:
    listener, _ = listening(Settings(gateway_address="[::]:0", gateway_keys_file="keys"))
    with listener, socket.create_connection((address, listener.getsockname()[1]), timeout=30):
        pass


def test_connections_send_at_once() -> None:
    """An answer's body must not wait for the acknowledgement of its headers."""
    listener, _ = listening(Settings(gateway_address="0"))
    with listener, socket.create_connection(listener.getsockname(), timeout=30):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("address", ["203.0.113.1", "a" * 300])
def test_an_address_of_another_machine_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match=r"^gateway_address: can't listen at .*\. Set EMBEDCTL_GATEWAY_ADDRESS"):
        listening(Settings(gateway_address=f"{address}:0"))


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}: Address already in use"):
            listening(Settings(gateway_address=str(port)))


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]", "[::ffff:127.0.0.1]", "localhost", "lan.example"])
def test_without_keys_other_machines_can_not_reach_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = socket.getaddrinfo
    leads = {"lan.example": "0.0.0.0", "localhost": "0.0.0.0"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: asked(leads.get(host, host), *rest, **more))
    with pytest.raises(SettingsError, match="can be reached from other machines"):
        listening(Settings(gateway_address=f"{address}:0"))
