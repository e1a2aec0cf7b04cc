"""Requests of the gateway's own: where they must not lead, and how long they may take."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import trustme

from embedctl_config.errors import SettingsError
from embedctl_gateway.http.addresses import address_in, is_public, networks_of
from embedctl_gateway.http.outward import NotSent, Outward

#: Addresses that nobody's webhook should reach by mistake, by what they are.
SPECIAL = {
    "this network": "0.0.0.0",
    "private": "10.0.0.1",
    "shared by a provider": "100.64.0.1",
    "loopback": "127.0.0.1",
    "another loopback": "127.255.255.254",
    "a cloud's metadata": "169.254.169.254",
    "private of class B": "172.31.255.255",
    "of protocols": "192.0.0.8",
    "an example": "192.0.2.1",
    "a relay of 6to4": "192.88.99.1",
    "private of class C": "192.168.1.1",
    "of benchmarks": "198.18.0.1",
    "multicast": "224.0.0.1",
    "multicast of everywhere": "239.255.255.255",
    "reserved": "240.0.0.1",
    "broadcast": "255.255.255.255",
    "nothing of IPv6": "::",
    "loopback of IPv6": "::1",
    "mapped": "::ffff:10.0.0.1",
    "mapped loopback": "::ffff:127.0.0.1",
    "compatible": "::127.0.0.1",
    "by way of NAT64": "64:ff9b::a9fe:a9fe",
    "by way of a NAT64 of one's own": "64:ff9b:1::1",
    "discarded": "100::1",
    "Teredo": "2001:0:1::1",
    "an example of IPv6": "2001:db8::1",
    "6to4": "2002:7f00:1::1",
    "a new example": "3fff::1",
    "unique and local": "fd00:ec2::254",
    "link-local": "fe80::1",
    "link-local with its zone": "fe80::1%eth0",
    "site-local": "fec0::1",
    "multicast of IPv6": "ff02::1",
    "multicast of everywhere in IPv6": "ff0e::1",
}
PUBLIC = ["93.184.215.14", "1.1.1.1", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:1.1.1.1", "64:ff9b::101:101"]


def resolving(*answers: str) -> Callable[..., list[tuple[Any, ...]]]:
    """A resolver that gives one answer after the other; an answer is addresses with spaces between them."""
    left = list(answers)

    def resolve(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        given = left.pop(0).split()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in given]

    return resolve


@contextmanager
def serving(
    answer: Callable[[socket.socket], None], host: str = "127.0.0.1", port: int = 0
) -> Iterator[tuple[int, list[bytes]]]:
    """A server whose connections are answered so; gives its port, and the beginnings of the requests that came."""
    came: list[bytes] = []
    threads: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            came.append(connection.recv(65536, socket.MSG_PEEK))
            answer(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=one, args=(listener.accept()[0],)))
                threads[-1].start()

    with socket.create_server((host, port)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield listener.getsockname()[1], came
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for each in threads:
                each.join()


def no_content(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


def test_a_name_that_leads_to_a_special_address_is_not_connected_to() -> None:
    answers = [answer for address in SPECIAL.values() for answer in (address, f"93.184.215.14 {address}")]
    outward = Outward("https://told.example/", (), resolving(*answers))
    for answer in answers:
        with pytest.raises(NotSent) as refused:
            outward.post(b"{}", {}, 5.0)
        address = answer.rpartition(" ")[2]
        assert f"leads to {address}, and gateway_webhook_networks do not allow that" in str(refused.value)


def test_what_is_public_and_what_an_operator_allows() -> None:
    assert [each for each in PUBLIC if not is_public(address_in(each))] == []
    assert networks_of("", "x") == ()
    assert networks_of(" 10.0.0.0/8, fd00::/8", "x") == (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
    for wrong in ("10.0.0.1/8", "inside", "10.0.0.0/8;fd00::/8"):
        with pytest.raises(SettingsError, match=r"^x: .*Write networks such as"):
            networks_of(wrong, "x")


def test_over_plain_http_even_a_public_address_is_not_connected_to() -> None:
    allowed = networks_of("127.0.0.0/8", "x")
    with pytest.raises(NotSent, match="and https:// and gateway_webhook_networks do not allow"):
        Outward("http://told.example/", allowed, resolving("93.184.215.14")).post(b"{}", {}, 5.0)


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f.1", "0177.0.0.1", "127.1", "localhost", "[::1]", "[::ffff:7f00:1]"]
)
def test_other_ways_to_write_loopback_are_no_way_in(host: str) -> None:
    with serving(no_content) as (port, came):
        with pytest.raises(NotSent, match="leads to"):
            Outward(f"http://{host}:{port}/", networks_of("10.0.0.0/8", "x")).post(b"{}", {}, 5.0)
        assert not came


def test_a_name_that_leads_elsewhere_after_the_check_is_not_followed() -> None:
    """DNS rebinding: the second answer is for another address, where something listens at the same port."""
    with serving(no_content, "127.0.0.2") as (port, came), serving(no_content, "127.0.0.1", port) as (_, trapped):
        outward = Outward(
            f"http://told.example:{port}/told?by=us",
            networks_of("127.0.0.2", "x"),
            resolving("127.0.0.2", "127.0.0.1", "127.0.0.2"),
        )
        assert outward.post(b"one", {"x": "y"}, 5.0) == 204
        with pytest.raises(NotSent, match=r"leads to 127\.0\.0\.1"):
            outward.post(b"two", {}, 5.0)
        assert outward.post(b"three", {}, 5.0) == 204
    assert trapped == []
    assert [each.rpartition(b"\r\n\r\n")[2] for each in came] == [b"one", b"three"]
    assert came[0].startswith(f"POST /told?by=us HTTP/1.1\r\nhost: told.example:{port}\r\n".encode())


def repeats(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")


def is_silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


@pytest.mark.parametrize(("scheme", "answer"), [("http", is_silent), ("https", is_silent), ("http", repeats)])
def test_a_try_ends_in_time_whatever_comes(scheme: str, answer: Callable[[socket.socket], None]) -> None:
    with serving(answer) as (port, came):
        outward = Outward(f"{scheme}://127.0.0.1:{port}/", networks_of("127.0.0.0/8", "x"))
        with pytest.raises(NotSent, match=r"no answer within 0\.3 s"):
            outward.post(b"{}", {}, 0.3)
        assert len(came) == 1


def test_a_resolver_that_hangs_takes_no_longer() -> None:
    over = threading.Event()
    try:
        with pytest.raises(NotSent, match=r"no answer within 0\.3 s"):
            Outward("https://told.example/", (), lambda *_, **__: over.wait(60)).post(b"{}", {}, 0.3)  # type: ignore[arg-type]  # it never answers
    finally:
        over.set()


def other_protocol(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"SSH-2.0-x\r\n\r\n")


def long_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nx: " + b"x" * 1_000_000)


def long_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n" + b"x" * 10_000_000)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (long_head, "none of HTTP"),
        (other_protocol, "none of HTTP"),
        (lambda connection: connection.recv(65536), "closed without an answer"),
        (long_body, ""),
    ],
    ids=["long head", "no HTTP", "nothing", "long body"],
)
def test_of_an_answer_the_status_alone_is_read(answer: Callable[[socket.socket], None], told: str) -> None:
    with serving(answer) as (port, _):
        outward = Outward(f"http://127.0.0.1:{port}/", networks_of("127.0.0.0/8", "x"))
        if not told:
            assert outward.post(b"{}", {}, 30.0) == 200
            return
        with pytest.raises(NotSent, match=told):
            outward.post(b"{}", {}, 30.0)


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[socket.socket], None]:
    """Answers over TLS as told.example, whose authority the system trusts."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("told.example").configure_cert(context)

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as wrapped:
            no_content(wrapped)

    return answer


def test_the_certificate_is_for_the_name_and_not_for_the_address(tls: Callable[[socket.socket], None]) -> None:
    networks = networks_of("127.0.0.1", "x")
    with serving(tls) as (port, _):
        url = f"https://told.example:{port}/"
        assert Outward(url, networks, resolving("127.0.0.1")).post(b"{}", {}, 30.0) == 204
        with pytest.raises(NotSent, match="CERTIFICATE_VERIFY_FAILED"):
            Outward(f"https://other.example:{port}/", networks, resolving("127.0.0.1")).post(b"{}", {}, 30.0)


def test_a_proxy_of_the_environment_resolves_the_name_itself(
    tls: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def proxy(connection: socket.socket) -> None:
        head = connection.recv(65536)
        allowed = head.startswith(b"CONNECT told.example:443 HTTP/1.1\r\n")
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" if allowed else b"HTTP/1.1 403 No\r\n\r\n")
        if allowed:
            tls(connection)

    with serving(proxy) as (port, came):
        monkeypatch.setenv("https_proxy", f"http://me:word@127.0.0.1:{port}")
        assert Outward("https://told.example/", (), resolving()).post(b"{}", {}, 30.0) == 204
        assert b"Proxy-Authorization: Basic bWU6d29yZA==\r\n" in came[0]
        with pytest.raises(NotSent, match="the proxy answers with status 403"):
            Outward("https://other.example/", (), resolving()).post(b"{}", {}, 30.0)
