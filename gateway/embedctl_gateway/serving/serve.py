"""Runs the gateway: listens, answers, stops cleanly."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any

from embedctl.operating.monitoring.endpoint import listen_at
from embedctl_config.address import is_loopback
from embedctl_config.errors import EmbedctlError, MissingExtra, SettingsError
from embedctl_config.settings import Settings, expanded

try:
    import tenacity  # noqa: F401  (the first retry imports it, which takes 0.1 s, and nobody is to wait for that)
    from uvicorn import Config, Server

    from embedctl_gateway.batches.apart import Apart
    from embedctl_gateway.calls.common import Gateway
    from embedctl_gateway.serving.application import application
    from embedctl_gateway.serving.connections import Crowd, TimedProtocol, TlsProtocol
    from embedctl_gateway.serving.entrance import Entrance, FewAtATime
    from embedctl_gateway.serving.memory import prepare
except ModuleNotFoundError as error:
    raise MissingExtra("gateway", "`embedctl gateway`") from error

#: A request's line and headers together.
MAX_HEAD_BYTES = 32 * 1024
#: An idle connection stays open for this long: longer than those of most proxies, which would otherwise use one that
#: closes (seconds).
_KEEP_ALIVE_S = 75
_OPEN_FILES = 4096
#: A thread that computes gives way to the event loop after as long (seconds): requests go from thread to thread.
_SWITCH_S = 0.0005
#: Connections that the system keeps until they are accepted.
_WAITING = 2048
#: Bytes of an answer in the system's memory that are not on their way. So the gateway sees soon that a client reads.
_UNSENT_BYTES = 128 * 1024


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Answer until SIGTERM, or Ctrl-C, which is raised; what is in flight then is answered still. `say` is told where
    the gateway is. Raises SettingsError if the address is taken, other machines can reach it and there are no keys, or
    the keys or the certificate can't be read."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("uvicorn.error", "python_multipart"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what strangers send is no warning
    gateway = Gateway(settings)
    server = make_server(settings, gateway)
    _raise_limit_of_files()
    sys.setswitchinterval(_SWITCH_S)
    lost = threading.Event()

    def end() -> None:
        lost.set()
        server.should_exit = True

    gc.freeze()  # what is here stays: a look through it for garbage takes 30 ms, and nobody is answered meanwhile
    gateway.runner = Apart(gateway.runner, end)  # before there are threads, and before there is a socket to inherit
    prepare()
    try:
        _serve(settings, gateway, server, say)
    finally:
        gateway.runner.stop()
    if lost.is_set():
        raise EmbedctlError("the process that runs batches has ended")


def _serve(settings: Settings, gateway: Gateway, server: Server, say: Callable[[str], None]) -> None:
    listener, url = listening(settings)
    with listener:
        nobody_else = "everyone on this machine alone, as it has no keys"
        whom = "the holders of its keys" if gateway.access.has_keys else nobody_else
        say(f"the gateway is at {url}/v1 for {whom}; stop with Ctrl-C")
        # Before uvicorn hears signals, and when it raises them again after a clean end: SIGTERM is no error.
        signal.signal(signal.SIGTERM, server.handle_exit)
        server.run([listener])


class _Config(Config):
    crowd: Crowd

    def get_loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop]:
        return lambda: asyncio.SelectorEventLoop(FewAtATime(self.crowd.clients))


class _Server(Server):
    """Takes connections through entrances, instead of as many as there are."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._entrances = [Entrance(each, self._protocol) for each in sockets or ()]
        for each in self._entrances:
            each.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for each in self._entrances:
            each.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def make_server(settings: Settings, gateway: Gateway) -> Server:
    """The server, not yet running; raises SettingsError if the certificate or its key can't be read."""
    config = _Config(
        application(gateway),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.gateway_timeout_s) + 1,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ssl_certfile=_file(settings.gateway_tls_cert_file, "gateway_tls_cert_file"),
        ssl_keyfile=_file(settings.gateway_tls_key_file, "gateway_tls_key_file"),
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(f"gateway_tls_cert_file, gateway_tls_key_file: can't be used: {reason}") from error
    config.crowd = crowd = Crowd()
    tls, config.ssl = config.ssl, None

    def protocol(**options: Any) -> TimedProtocol | TlsProtocol:
        made = TimedProtocol(crowd=crowd, tenant_of=gateway.access.tenant_of, **options)
        return made if tls is None else TlsProtocol(made, tls)

    config.http_protocol_class = protocol  # type: ignore[assignment]  # uvicorn only calls it
    return _Server(config)


def listening(settings: Settings) -> tuple[socket.socket, str]:
    """The socket of the gateway, and the URL where callers find it; raises SettingsError if the address is none of this
    machine, the port is taken, or other machines can reach it and the gateway has no keys."""
    listener, address = listen_at(settings.gateway_address, "gateway_address")
    listener.setblocking(False)
    listener.listen(_WAITING)
    # Of the socket, because a name may lead anywhere.
    if not settings.gateway_keys_file and not is_loopback(listener.getsockname()[0]):
        listener.close()
        raise SettingsError(
            f"gateway_address: {settings.gateway_address!r} can be reached from other machines, and the gateway would "
            "ask nobody for a key. Make one with `embedctl gateway key add NAME --keys FILE`, and name the file with "
            "--keys or EMBEDCTL_GATEWAY_KEYS_FILE; or listen at 127.0.0.1"
        )
    # Connections inherit it. asyncio sets it only for sockets that name their protocol; without it, the body of an
    # answer waits until the client has acknowledged the headers, which takes 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return listener, f"{'https' if settings.gateway_tls_cert_file else 'http'}://{address}"


def _file(path: str, setting: str) -> str | None:
    return str(expanded(path, setting)) if path else None


def _raise_limit_of_files() -> None:
    """Room for connections: many systems allow 1,024 files unless a process asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
