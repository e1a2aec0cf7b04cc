"""The HTTP endpoint of a process: its metrics, and whether it is well and ready."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from embedctl_config.address import Address, address_of
from embedctl_config.errors import SettingsError
from embedctl_config.settings import ENV_PREFIX

log = logging.getLogger(__name__)

#: A connection that is silent for this long is closed (seconds).
_PATIENCE_S = 10
#: How often the server checks whether it is to stop (seconds).
_POLL_S = 0.1
_PLAIN = "text/plain; charset=utf-8"

#: Gives the content type and the page of metrics for an `Accept` header.
MetricsPage = Callable[[str], tuple[str, bytes]]


class Health(Protocol):
    """Answers at once, without waiting for Redis."""

    def illness(self) -> str:
        """Why the process is not well, in one line; empty if it is."""
        ...

    def hindrance(self) -> str:
        """Why the process is not ready, in one line; empty if it is."""
        ...


class Endpoint:
    """Serves `/metrics`, `/healthz` and `/readyz` while the context lasts. With port 0 in the setting, `url` names the
    port that was free. Raises SettingsError if it can't listen there."""

    def __init__(self, metrics_address: str, metrics: MetricsPage, health: Health) -> None:
        listener, (host, port) = listen_at(metrics_address, "metrics_address")
        self._server = _Server(listener, metrics, health)
        # Other machines need a name in place of "every address".
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104  (compared, not listened on)
        self.url = f"http://{Address(shown, port)}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="endpoint", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def listen_at(text: str, setting: str) -> tuple[socket.socket, Address]:
    """A socket that listens where a setting says, and its address, which names the port that was free if it said 0;
    raises SettingsError if it is no address, or none of this machine, or the port is taken."""
    address = address_of(text, setting)
    try:
        family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(where, family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no address"
        raise SettingsError(
            f"{setting}: can't listen at {address}: {reason}. Set {ENV_PREFIX}{setting.upper()} to another"
        ) from error
    return listener, address._replace(port=listener.getsockname()[1])


class _Server(ThreadingTCPServer):
    """A thread for each request. Not HTTPServer, which looks up its own name in the DNS before it begins."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, metrics: MetricsPage, health: Health) -> None:
        self.metrics, self.health = metrics, health
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()  # it made one of its own, which listens nowhere
        self.socket = listener

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may go away at any time: that is logged at level debug only."""
        log.debug("a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE_S
    server_version, sys_version = "embedctl", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        status, content_type, body = self._page(urlsplit(self.path).path)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _page(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        if path == "/metrics":
            return HTTPStatus.OK, *self.server.metrics(self.headers.get("Accept", ""))
        if path == "/healthz":
            trouble = self.server.health.illness()
        elif path == "/readyz":
            trouble = self.server.health.hindrance()
        else:
            return HTTPStatus.NOT_FOUND, _PLAIN, b"there are /metrics, /healthz and /readyz\n"
        status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
        return status, _PLAIN, f"{trouble or 'ok'}\n".encode()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (http.server's name)
        log.debug("%s %s", self.address_string(), format % args)
