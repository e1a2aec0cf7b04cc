"""Asks the gateway that `url` names: one request of HTTP after the other, over connections that stay open."""

from __future__ import annotations

import os
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode, urlsplit

import orjson

from embedctl.common.proxies import proxy_of
from embedctl_config import errors
from embedctl_config.errors import (
    BrokerRefused,
    EmbedctlError,
    GatewayUnavailable,
    InputError,
    NotPermitted,
    QuotaExceeded,
    SettingsError,
)
from embedctl_config.redis_url import certificates, read_password
from embedctl_config.settings import Settings, expanded

#: A gateway that says nothing for this long is away; it never waits for so long (seconds).
_PATIENCE_S = 30.0
#: So many connections stay open while nobody uses them.
_MOST_IDLE = 16
#: The longest answer: a chunk's result is a value of Redis (bytes).
_MOST_BYTES = 512 * 1024 * 1024
#: What may be answered otherwise a moment later.
_NOT_NOW = (408, 429, 502, 503, 504)


class Answer(NamedTuple):
    """What the gateway answered: the status is one of success."""

    status: int
    body: bytes

    @property
    def fields(self) -> Any:
        """The body, which is JSON."""
        return orjson.loads(self.body)


class Asks(Protocol):
    """What answers the calls; see :class:`Calls`."""

    def ask(
        self,
        method: str,
        path: str,
        fields: Any = None,
        *,
        body: bytes | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Answer: ...

    def close(self) -> None: ...


class Calls:
    """The calls of one gateway. Threads may share it, and so may the children of its process.

    Every call raises GatewayUnavailable if the gateway can't be reached or can't answer now, NotPermitted if it takes
    no such key, and the library's own errors as the gateway raised them. A call may have been carried out all the same
    if its answer is lost, so each is one that may be made twice. Raises SettingsError if the file of the key or of the
    certificates can't be read.
    """

    def __init__(self, settings: Settings) -> None:
        parts = urlsplit(settings.url)
        self._settings = settings
        self._shown = settings.url.rstrip("/").removesuffix("/v1")
        self._path = urlsplit(self._shown).path
        self._is_tls = parts.scheme == "https"
        self._host, self._port = str(parts.hostname), parts.port or (443 if self._is_tls else 80)
        self._certificates = certificates(settings.tls_ca_file) if settings.tls_ca_file else None
        self._tls: ssl.SSLContext | None = None
        self._idle: deque[HTTPConnection] = deque(maxlen=_MOST_IDLE)
        self._process = os.getpid()
        self._headers()

    def ask(
        self,
        method: str,
        path: str,
        fields: object = None,
        *,
        body: bytes | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Answer:
        """Make a call below `/v1`. `fields` are sent as JSON, `body` as it is."""
        target = f"{self._path}/v1/{path}" + (f"?{urlencode(query)}" if query else "")
        headers = self._headers()
        if fields is not None:
            body = orjson.dumps(fields)
            headers["content-type"] = "application/json"
        try:
            status, told, found = self._exchanged(method, target, body, headers)
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise GatewayUnavailable(f"the gateway at {self._shown} can't be reached: {reason}") from error
        if not 200 <= status < 300:
            raise self._error(status, told, found)
        return Answer(status, found)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            with suppress(IndexError):  # another thread took it
                self._idle.pop().close()

    def _headers(self) -> dict[str, str]:
        headers = {"user-agent": "embedctl"}
        if file := self._settings.api_key_file:
            key = read_password(expanded(file, "api_key_file"), "api_key_file").strip()
            if not key.isascii() or not key.isprintable():
                raise SettingsError(f"api_key_file: {file} holds no key of a gateway")
            headers["authorization"] = f"Bearer {key}"
        return headers

    def _exchanged(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, Message, bytes]:
        """The status, the headers and the body of an answer. A connection that was idle may have been closed by the
        other side meanwhile; then a new one asks again."""
        if self._process != os.getpid():  # the sockets belong to the parent
            self._idle, self._process = deque(maxlen=_MOST_IDLE), os.getpid()
        while True:
            try:
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = self._connection(), True
            try:
                connection.request(method, target, body, headers)
                answer = connection.getresponse()
                found = _read(answer)
            except (OSError, HTTPException) as error:
                connection.close()
                if is_new or isinstance(error, TimeoutError):
                    raise
                continue
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
            return answer.status, answer.headers, found

    def _connection(self) -> HTTPConnection:
        """A new connection, through the proxy that the environment names, if it names one. It is not open yet."""
        if self._is_tls and self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._certificates)
        proxy = proxy_of("https" if self._is_tls else "http", self._host)
        host, port = (self._host, self._port) if proxy is None else (proxy.host, proxy.port)
        made = (
            HTTPConnection(host, port, timeout=_PATIENCE_S)
            if self._tls is None
            else HTTPSConnection(host, port, timeout=_PATIENCE_S, context=self._tls)
        )
        if proxy is not None:
            made.set_tunnel(self._host, self._port, dict(proxy.headers))
        return made

    def _error(self, status: int, headers: Message, body: bytes) -> EmbedctlError:
        """The error that an answer tells."""
        message, code = f"it answers with status {status}", ""
        with suppress(orjson.JSONDecodeError, LookupError, TypeError):
            told = orjson.loads(body)["error"]
            message, code = str(told["message"]), str(told["code"])
        if code == "quota_exceeded":
            tenant, limit, most, used, after_s, final = headers["x-quota"].split(" ")
            return QuotaExceeded(
                message,
                tenant=tenant,
                limit=limit,
                most=int(most),
                used=int(used),
                after_s=float(after_s),
                is_final=final == "1",
            )
        kind = getattr(errors, "".join(word.capitalize() for word in code.split("_")), None)
        if isinstance(kind, type) and issubclass(kind, EmbedctlError):
            return kind(message)
        where = f"the gateway at {self._shown}"
        if status in (401, 403):
            return NotPermitted(f"{where} refuses: {message}. EMBEDCTL_API_KEY_FILE names the file with the key")
        if status == 413:
            return InputError(f"{where} refuses: {message}")
        if status in _NOT_NOW:
            after = headers.get("retry-after", "")
            return GatewayUnavailable(
                f"{where} can't answer now: {message}", float(after) if after.isdecimal() else 0.0
            )
        if status == 404:
            return BrokerRefused(f"{where} knows no such call: is this a gateway of embedctl, and not an older one?")
        return BrokerRefused(f"{where} refuses: {message}")


def _read(answer: HTTPResponse) -> bytes:
    found = answer.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise HTTPException("its answer is longer than any chunk's result")
    if answer.length:  # the read itself says nothing of a connection that ended in the middle
        raise IncompleteRead(found, answer.length)
    return found
