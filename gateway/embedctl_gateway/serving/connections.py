"""Connections of clients that are slow on purpose, or gone without a word."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from embedctl_gateway.calls.common import KNOWN

#: A request's line and headers may take this long, and a client that reads nothing is waited for as long (seconds).
TIMEOUT_S = 20.0
#: Open connections; for a further one, the oldest of which nobody has shown a key is closed, or else itself.
MAX_CONNECTIONS = 900


class TimedProtocol(H11Protocol):
    """Closes a connection that begins no request for :data:`TIMEOUT_S`, or takes nothing of its answer for as long.
    uvicorn alone waits for both without end. The body of a request has a limit of its own."""

    timeout_s = TIMEOUT_S
    max_connections = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_known = False
        self._since = self.loop.time()
        self._unread = 0
        self._made = self.loop.time()
        self._check: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            every: set[Any] = self.connections
            strangers = [each for each in every if not each.is_known]
            least = min(strangers, key=lambda each: each._made, default=self)
            least.transport.abort()
            if least is self:
                return
        self._look_later()

    @property
    def is_known(self) -> bool:
        """Whether its last request has shown a key, or needed none of a gateway without keys."""
        self._is_known |= self.scope is not None and KNOWN in self.scope["state"]
        return self._is_known

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset, its timer would keep all of this in memory

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP. uvicorn alone would let the request that they end go on, and answer twice."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        self._is_known = self.is_known  # the next request has another scope
        self._since = self.loop.time()
        super().on_response_complete()

    def _look_later(self) -> None:
        self._check = self.loop.call_later(self.timeout_s / 4, self._look)

    def _look(self) -> None:
        if self._has_moved():
            self._since = self.loop.time()
        elif self.loop.time() - self._since >= self.timeout_s:
            self.transport.abort()
            return
        self._look_later()

    def _has_moved(self) -> bool:
        """Whether nothing is to be expected of the client, or it has read something since the last look."""
        unread, before = _unread(self.transport), self._unread
        self._unread = unread
        if unread:
            return unread != before
        answering = self.cycle is not None and not self.cycle.response_complete
        # uvicorn has a limit of its own for this.
        between_requests = self.timeout_keep_alive_task is not None and self.conn.their_state is h11.IDLE
        return answering or between_requests


def _unread(transport: Any) -> int:
    return int(transport.get_write_buffer_size())
