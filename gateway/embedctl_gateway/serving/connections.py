"""Connections of clients that are slow on purpose, too many, or gone without a word. A client with many connections
has no more turns of the event loop than a client with one."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr

from embedctl_config import keys
from embedctl_gateway.calls.common import KNOWN

#: A request's line and headers may take this long, and a client that reads too little is waited for as long (seconds).
TIMEOUT_S = 20.0
#: A client that reads less in this time reads too little (bytes).
LEAST_READ_BYTES = 32 * 1024
#: Open connections.
MAX_CONNECTIONS = 2500
#: Lines of a request before its body. Proxies take up to 100 headers.
MAX_LINES = 128
#: A tenant that asked in this time may ask again, and pauses for it last this long at most (seconds).
_LATELY_S, _LONGEST_PAUSE_S = 1.0, 0.03
#: A round is held for so long at most while others are answered. Half of all small requests take a fifth of it; of
#: those that a round overtakes, nearly each waits for a CPU at every step (seconds).
_HELD_S = 0.05
#: How often the cost of a turn is measured (seconds).
_MEASURED_S = 0.1
_LENGTHS = {b"content-length", b"transfer-encoding"}
_HEAD_END = re.compile(rb"\n\r?\n")


class Crowd:
    """The connections of one gateway, by client: a tenant, or the address of those who have shown no key.

    Each client has a turn of the event loop at once, unless it has had one in this round, or others of its connections
    wait. These take turns with other clients. If there are tenants that wait for nothing, whose next request is to find
    the loop free, a pause follows the round: twice as long as this process computes for as many turns, in whichever
    threads, and as long as the round. So those who wait have half of a CPU together. While such a tenant is being
    answered, the next round is held a little: there are about ten steps to an answer, and each would wait for others'.
    """

    def __init__(self) -> None:
        #: File of a connection → its client.
        self.clients: dict[int, str] = {}
        self._of: dict[str, dict[TimedProtocol, None]] = {}
        self._strangers = self._count = 0
        self._waiting: dict[str, deque[TimedProtocol]] = {}
        self._served: set[str] = set()
        self._lately: dict[str, float] = {}
        #: Client → its requests that are being answered, and since when.
        self._answering: dict[str, dict[TimedProtocol, float]] = {}
        self._held: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._is_due = False
        #: Turns since what they cost was measured, and then the time and the CPU's seconds of this process.
        self._turns, self._measured_at, self._computed_s = 0, 0.0, 0.0
        self._cost_s = 0.0

    def add(self, one: TimedProtocol) -> None:
        """Take in a connection, whose client is not known yet. If there are too many, a client of the most of them
        loses one: strangers first, unless they have few."""
        self._put(one)
        if self._count <= one.max_connections:
            return
        every = self._strangers <= one.max_connections // keys.RESERVE
        largest = max(
            (each for each in self._of.values() if every or not next(iter(each)).tenant),
            key=lambda each: (len(each), one in each),
        )
        next((each for each in largest if each.waits_for_client()), one).transport.abort()

    def remove(self, one: TimedProtocol) -> None:
        self.answered(one)
        same = self._of.get(one.whose, {})
        if one in same:
            del same[one], self.clients[one.file]
            self._count -= 1
            self._strangers -= not one.tenant
            if not same:
                del self._of[one.whose]

    def __contains__(self, one: TimedProtocol) -> bool:
        return one in self._of.get(one.whose, ())

    def know(self, one: TimedProtocol, tenant: str) -> None:
        """Note whose connection it is: its caller has shown a key, or needed none; and is being answered."""
        if tenant != one.tenant:
            self.remove(one)
            one.tenant = tenant
            self._put(one)
            self._lately[one.whose] = one.loop.time()
        self._answering.setdefault(one.whose, {})[one] = one.loop.time()

    def answered(self, one: TimedProtocol) -> None:
        """Note that nobody waits for the answer to its request any more."""
        same = self._answering.get(one.whose, {})
        if same.pop(one, None) is not None and not same:
            del self._answering[one.whose]
            if self._held is not None and self._holds_s(one.loop.time()) <= 0:
                self._held.cancel()
                self._held = None
                one.loop.call_soon(self._serve, one.loop)

    def has_turn(self, one: TimedProtocol) -> bool:
        """Whether a connection may go on now. If not, it is told to when its turn has come."""
        loop, whose = one.loop, one.whose
        if one.tenant:
            self._lately[whose] = loop.time()
        if whose in self._waiting or whose in self._served:
            self._waiting.setdefault(whose, deque()).append(one)
            if not self._is_due:
                self._is_due, self._began = True, loop.time()
                loop.call_soon(self._next_round, loop)
            return False
        if not self._served:
            loop.call_soon(self._served.clear)
        self._served.add(whose)
        self._turns += 1
        return True

    def _put(self, one: TimedProtocol) -> None:
        self._of.setdefault(one.whose, {})[one] = None
        self.clients[one.file] = one.whose
        self._count += 1
        self._strangers += not one.tenant

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a round, or pause before it."""
        self._waiting = {whose: waiting for whose, waiting in self._waiting.items() if waiting}
        if not self._waiting:
            self._is_due = False
            return
        now = loop.time()
        self._lately = {whose: at for whose, at in self._lately.items() if at > now - _LATELY_S}
        self._measure(now)
        pause_s = 0.0
        if self._lately.keys() - self._waiting.keys():
            pause_s = min(max(now - self._began, 2 * self._cost_s * len(self._waiting)), _LONGEST_PAUSE_S)
        loop.call_later(pause_s, self._serve, loop)

    def _measure(self, now: float) -> None:
        """Learn what a turn costs, with all that the process does for it later."""
        if now - self._measured_at < _MEASURED_S:
            return
        computed_s = time.process_time()
        if self._turns and now - self._measured_at < _LATELY_S:
            self._cost_s = (computed_s - self._computed_s) / self._turns
        self._turns, self._measured_at, self._computed_s = 0, now, computed_s

    def _holds_s(self, now: float) -> float:
        """How much longer the next round is held for those who are being answered and wait for no turn (seconds)."""
        others = self._answering.keys() & self._lately.keys() - self._waiting.keys()
        asked = max((at for whose in others for at in self._answering[whose].values()), default=-inf)
        return min(asked, self._began) + _HELD_S - now

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        now, self._held = loop.time(), None
        if (hold_s := self._holds_s(now)) > 0:
            self._held = loop.call_later(hold_s, self._serve, loop)
            return
        self._began = now
        self._turns += len(self._waiting)
        for waiting in self._waiting.values():
            loop.call_soon(waiting.popleft().go_on)  # by itself: if one fails, the others still have their turns
        loop.call_soon(self._next_round, loop)


class _Requests(h11.Connection):
    """Refuses a request with two lengths: a proxy in front may go by the one, and take what is behind it for another
    caller's request."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= _LENGTHS:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding", error_status_hint=400)
        return event


class TimedProtocol(H11Protocol):
    """Closes a connection that begins no request for :data:`TIMEOUT_S`, or takes too little of its answer. uvicorn
    alone waits for both without end. The body of a request has a limit of its own.

    Attributes:
        tenant: whose key was shown here; empty if none was.
        file: that of its socket.
    """

    timeout_s = TIMEOUT_S
    max_connections = MAX_CONNECTIONS

    def __init__(self, *args: Any, crowd: Crowd, tenant_of: Callable[[bytes], str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Requests(h11.SERVER, self.config.h11_max_incomplete_event_size or 0)
        self.tenant = ""
        self._crowd = crowd
        self._tenant_of = tenant_of
        self._waits_for_turn = False
        self.app_state = {**self.app_state, KNOWN: self._know}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._unread = self._read = 0
        self._check = self.loop.call_later(self.timeout_s / 4, self._look)
        self.take_in(transport)

    def take_in(self, transport: asyncio.Transport) -> None:
        """Give it a place among the connections, unless it has one."""
        if self not in self._crowd:
            self.transport, self.client = transport, get_remote_addr(transport)
            self.file = transport.get_extra_info("socket").fileno()
            self._crowd.add(self)

    def give_up(self) -> None:
        """Give its place to others."""
        self._crowd.remove(self)

    @property
    def whose(self) -> str:
        """Its client."""
        return f"tenant {self.tenant}" if self.tenant else self.client[0] if self.client else ""

    def waits_for_client(self) -> bool:
        """Whether it is the client's turn: to ask, to send the rest of a body, or to read."""
        answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        return not answering or bool(_unread(self.transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        self.give_up()
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

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waits_for_turn:
            self.flow.pause_reading()

    def handle_events(self) -> None:
        """Handle what has come, once it is this connection's turn."""
        if self._waits_for_turn:
            return
        if not self.tenant and self.conn.their_state is h11.IDLE:  # at its address, strangers may wait
            self._know(self._tenant_of(self.conn.trailing_data[0]))
        if self._crowd.has_turn(self):
            self._handle()
        else:
            self._waits_for_turn = True
            self.flow.pause_reading()

    def go_on(self) -> None:
        """Its turn has come."""
        self._waits_for_turn = False
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._handle()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        self._crowd.answered(self)
        super().on_response_complete()

    def _handle(self) -> None:
        if self.conn.their_state is h11.IDLE:  # many short headers take long to parse
            come, _ = self.conn.trailing_data
            end = _HEAD_END.search(come)
            if come.count(b"\n", 0, end.start() if end else len(come)) > MAX_LINES:
                self.send_400_response("Too many headers.")
                return
        super().handle_events()

    def _know(self, tenant: str) -> None:
        if tenant and not self.transport.is_closing():
            self._crowd.know(self, tenant)

    def _look(self) -> None:
        if self._has_moved():
            self._since, self._read = self.loop.time(), 0
        elif self.loop.time() - self._since >= self.timeout_s:
            self.transport.abort()
            return
        self._check = self.loop.call_later(self.timeout_s / 4, self._look)

    def _has_moved(self) -> bool:
        """Whether nothing is to be expected of the client, or it has read enough since it last had."""
        unread, before = _unread(self.transport), self._unread
        self._unread = unread
        if unread:
            self._read += max(0, before - unread)
            return self._read >= LEAST_READ_BYTES or unread > before  # more is written once much is read
        answering = self.cycle is not None and not self.cycle.response_complete
        # uvicorn has a limit of its own for this.
        between_requests = self.timeout_keep_alive_task is not None and self.conn.their_state is h11.IDLE
        return answering or between_requests or self._waits_for_turn


class TlsProtocol(SSLProtocol):
    """TLS around another protocol. The connection has a place among all others before its handshake is over, which may
    take as long as a request's headers: who never begins one holds nobody's place."""

    def __init__(self, within: TimedProtocol, context: ssl.SSLContext) -> None:
        options: dict[str, Any] = {"waiter": None, "server_side": True, "ssl_handshake_timeout": within.timeout_s}
        super().__init__(within.loop, within, context, **options)
        self._within = within

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._within.take_in(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._within.give_up()
        super().connection_lost(exc)


def _unread(transport: Any) -> int:
    return int(transport.get_write_buffer_size())
