"""Requests of the gateway's own, to a URL that must not lead into a network of the operator's by mistake.

A name is resolved once for a request, and the addresses that were checked are those that are connected to, so another
answer of the resolver changes nothing. Redirects are not followed. A proxy of the environment leads where it decides.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import h11

from embedctl.common.daemons import DaemonThreads
from embedctl.common.proxies import Proxy, proxy_of
from embedctl_config.address import Address
from embedctl_gateway.http.addresses import Network, address_in, is_public

#: Resolves a name, as :func:`socket.getaddrinfo` does.
Resolve = Callable[..., list[tuple[Any, ...]]]
#: Names that are resolved at once: the system's resolver may take long, and can't be interrupted.
_RESOLVING = 8
_PIECE_BYTES = 4096


class NotSent(Exception):
    """Raised with the reason if a request was not answered, or must not be sent."""


class Outward:
    """Sends requests to one URL, http:// or https://. Threads may share it.

    Over https:// it goes to public addresses and into the `networks`, over http:// into these alone.
    """

    def __init__(self, url: str, networks: Sequence[Network], resolve: Resolve = socket.getaddrinfo) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = str(parts.hostname), parts.port or (80 if self._tls is None else 443)
        self._host_header = parts.netloc
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._networks = networks
        self._resolve = resolve
        self._resolvers = DaemonThreads(_RESOLVING, "resolvers")

    def post(self, body: bytes, headers: Mapping[str, str], within_s: float) -> int:
        """The status with which a body is answered; what the answer says besides is not read. Raises NotSent if there
        is no answer within these seconds, which count for all of it."""
        return asyncio.run(self._posted(body, headers, within_s))

    async def _posted(self, body: bytes, headers: Mapping[str, str], within_s: float) -> int:
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await self._connection(within_s)
                try:
                    about = {"host": self._host_header, "content-length": str(len(body)), "connection": "close"}
                    return await _status(reader, writer, _request("POST", self._target, {**about, **headers}), body)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            raise NotSent(f"no answer within {within_s:g} s") from None
        except h11.RemoteProtocolError as error:
            raise NotSent("the answer is none of HTTP") from error
        except (OSError, ValueError) as error:
            raise NotSent(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error

    async def _connection(self, within_s: float) -> tuple[StreamReader, StreamWriter]:
        proxy = proxy_of("https", self._host) if self._tls else None  # http:// leads into networks of one's own
        if proxy is not None:
            return await self._tunnel(proxy)
        addresses = await self._addresses()
        for address in addresses:
            try:
                async with asyncio.timeout(within_s / len(addresses)):
                    return await asyncio.open_connection(
                        address, self._port, ssl=self._tls, server_hostname=self._host if self._tls else None
                    )
            except (OSError, TimeoutError):
                if address == addresses[-1]:
                    raise
        raise NotSent(f"{self._host} has no address")

    async def _tunnel(self, proxy: Proxy) -> tuple[StreamReader, StreamWriter]:
        assert self._tls is not None
        target = str(Address(self._host, self._port))
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        try:
            status = await _status(reader, writer, _request("CONNECT", target, {"host": target, **proxy.headers}))
            if 200 <= status < 300:
                await writer.start_tls(self._tls, server_hostname=self._host)
                return reader, writer
        except BaseException:
            writer.transport.abort()
            raise
        writer.transport.abort()
        raise NotSent(f"the proxy answers with status {status}")

    async def _addresses(self) -> list[str]:
        """The addresses of the host, which were checked. Raises NotSent if it may not be connected to one of them."""
        resolving = self._resolvers.submit(self._resolve, self._host, self._port, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(str(each[4][0]) for each in await asyncio.wrap_future(resolving)))
        for each in found:
            address = address_in(each)
            is_own = any(address in network for network in self._networks)
            if not is_own and not (self._tls and is_public(address)):
                ways = "gateway_webhook_networks" if self._tls else "https:// and gateway_webhook_networks"
                raise NotSent(f"{self._host} leads to {each}, and {ways} do not allow that")
        return found


def _request(method: str, target: str, headers: Mapping[str, str]) -> h11.Request:
    return h11.Request(method=method, target=target, headers=[*headers.items()])


async def _status(reader: StreamReader, writer: StreamWriter, request: h11.Request, body: bytes = b"") -> int:
    """Send a request; returns the status of its answer."""
    http = h11.Connection(h11.CLIENT)
    writer.write(b"".join(http.send(each) or b"" for each in (request, h11.Data(body), h11.EndOfMessage())))
    await writer.drain()
    while True:
        event = http.next_event()
        if isinstance(event, h11.Response):
            return event.status_code
        if event is h11.NEED_DATA:
            if not (piece := await reader.read(_PIECE_BYTES)):
                raise NotSent("the connection was closed without an answer")
            http.receive_data(piece)
        elif not isinstance(event, h11.InformationalResponse):
            raise NotSent("the answer is none of HTTP")
