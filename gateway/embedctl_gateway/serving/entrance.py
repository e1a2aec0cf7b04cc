"""Lets connections in at a pace, and looks at a few of them at a time, of different clients first. A request takes
about ten turns of the event loop, and each would wait for all that a flood of connections brings at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import itemgetter
from typing import Any

from embedctl.common.notices import Reminder

log = logging.getLogger(__name__)

#: Connections are accepted so far apart (seconds). Each takes about half a millisecond until it can be read.
APART_S = 0.002
#: While there is no room for another one, this is the pause (seconds), as that of asyncio.
_FULL_S = 1.0
#: What the system says then.
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: Connections that the event loop looks at before all else has its turn; of a great many, such a part of them, because
#: each look finds all of them.
AT_ONCE, _PARTS = 4, 16


class FewAtATime(selectors.DefaultSelector):
    """Gives a few of the files that are ready: one of each client, then a second one of each, and so on, those first
    that it gave longest ago. The others stay ready.

    `clients` says whose the file of each connection is. Any other file is by itself.
    """

    def __init__(self, clients: Mapping[int, str]) -> None:
        super().__init__()
        self._clients = clients
        #: File → the number of the turn that it had last.
        self._turns: dict[int, int] = {}
        self._count = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if (most := max(AT_ONCE, len(ready) // _PARTS)) < len(ready):
            before: Counter[object] = Counter()
            ranked = []
            for each in sorted(ready, key=lambda each: self._turns.get(each[0].fd, 0)):
                whose = self._clients.get(each[0].fd, each[0].fd)
                ranked.append((before[whose], each))
                before[whose] += 1
            ready = [each for _, each in sorted(ranked, key=itemgetter(0))[:most]]
        for key, _ in ready:
            self._count += 1
            self._turns[key.fd] = self._count
        return ready

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = super().unregister(fileobj)
        self._turns.pop(key.fd, None)
        return key


class Entrance:
    """Accepts the connections of a listening socket, from :meth:`open` to :meth:`close`; `made` makes the protocol of
    each."""

    def __init__(self, listener: socket.socket, made: Callable[[], asyncio.BaseProtocol]) -> None:
        self._listener = listener
        self._made = made
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.TimerHandle | None = None
        self._entering: set[asyncio.Task[None]] = set()
        self._remind = Reminder(log.error)

    def open(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        pause_s = APART_S
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._remind(f"no connection can be accepted: {error.strerror}")
            pause_s = _FULL_S
        else:
            connection.setblocking(False)
            task = self._loop.create_task(self._enter(connection))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)
        self._loop.remove_reader(self._listener)
        self._next = self._loop.call_later(pause_s, self.open)

    async def _enter(self, connection: socket.socket) -> None:
        with suppress(OSError):  # it is gone already
            await self._loop.connect_accepted_socket(self._made, connection)
