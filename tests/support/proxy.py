"""A TCP proxy on loopback. It can go silent, close every connection, redirect, delay traffic and limit its rate."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.support.waiting import PATIENCE_S

T = TypeVar("T")
_BLOCK = 64 * 1024
#: Blocks in flight in one direction of a connection: about as many as a real link's buffers hold.
_BLOCKS_UNDER_WAY = 4


@dataclass(eq=False)
class _Link:
    """One connection through the proxy. Nothing passes while `flowing` is unset."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter | None = None
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self) -> None:
        for writer in (self.near, self.far):
            if writer is not None:
                writer.close()


class _Way:
    """One direction of the proxy. All connections share its rate."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self.bytes = 0

    async def carry(self, size: int, rate: float | None) -> None:
        """Wait until `size` bytes have gone through, queued after the earlier ones."""
        self.bytes += size
        if rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + size / rate
        await asyncio.sleep(self._free_at - now)


class Proxy:
    """Forwards connections on loopback to another port there or to a unix socket. It runs in its own thread.

    The first two attributes may be changed while it runs.

    Attributes:
        rate: bytes a second in each direction, of all connections together; None for no bound.
        delay_s: latency in each direction.
        accepted: connections that have come so far.
    """

    def __init__(self, target: int | Path, *, rate: float | None = None, delay_s: float = 0.0) -> None:
        self.rate = rate
        self.delay_s = delay_s
        self.accepted = 0
        self._to, self._from = _Way(), _Way()
        self._target = target
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._forwarding = True
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def frozen(self) -> bool:
        return not self._forwarding

    def start(self) -> None:
        self._thread.start()
        listener = socket.create_server(("127.0.0.1", 0))
        # The kernel would take tens of MB at once, and a client would then wait for their answer in vain.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BLOCKS_UNDER_WAY * _BLOCK)
        self._server = self._do(asyncio.start_server(self._accept, sock=listener))
        self.port = listener.getsockname()[1]

    def stop(self) -> None:
        """Close everything."""
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def freeze(self) -> None:
        """Stop forwarding without notifying either side: all connections are half open, including new ones."""
        self._do(self._set(forwarding=False))

    def thaw(self, *, resume: bool) -> None:
        """Forward new connections again. Old ones resume, or stay silent for good."""
        self._do(self._set(forwarding=True, resume=resume))

    def lead_to(self, target: int | Path) -> None:
        """Forward new connections elsewhere, like a host name that was changed. Old connections stay as they are."""
        self._target = target

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes that went to the target, and bytes that came back."""
        return self._to.bytes, self._from.bytes

    def cut(self) -> int:
        """Close every connection. Return their number."""
        return self._do(self._cut())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _set(self, *, forwarding: bool, resume: bool = False) -> None:
        self._forwarding = forwarding
        for link in self._links:
            if not forwarding:
                link.flowing.clear()
            # A connection that never reached the target has lost nothing: the target sees it as new.
            elif resume or link.far is None:
                link.flowing.set()

    async def _cut(self) -> int:
        links = list(self._links)
        for link in links:
            link.close()
            link.flowing.set()
        return len(links)

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, int):
            return await asyncio.open_connection("127.0.0.1", self._target)
        return await asyncio.open_unix_connection(self._target)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        link = _Link(writer)
        if self._forwarding:
            link.flowing.set()
        self._links.add(link)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await link.flowing.wait()
            far_reader, link.far = await self._connect()
            # Either end may close first. The other end is then closed too, but not while the network is silent.
            pumps = [
                asyncio.create_task(self._pump(link, self._to, reader, link.far)),
                asyncio.create_task(self._pump(link, self._from, far_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
        except OSError:
            pass  # Redis is down: the client notices because its connection is closed
        except asyncio.CancelledError:
            pass  # the proxy stops
        finally:
            link.close()
            self._links.discard(link)
            self._tasks.discard(task)

    async def _pump(self, link: _Link, way: _Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction of a connection until that direction ends. The delay does not reduce throughput."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_BLOCKS_UNDER_WAY)
        taking = asyncio.create_task(self._take_in(reader, under_way))
        now = asyncio.get_running_loop().time
        try:
            with suppress(OSError):
                while True:
                    due, data = await under_way.get()
                    await way.carry(len(data), self.rate)
                    await asyncio.sleep(max(0.0, due - now()))
                    await link.flowing.wait()
                    if not data:
                        return
                    writer.write(data)
                    await writer.drain()
            await link.flowing.wait()
        finally:
            taking.cancel()

    async def _take_in(self, reader: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Read blocks and queue each with its time of arrival. An empty block marks the end."""
        data = b"-"
        while data:
            try:
                data = await reader.read(_BLOCK)
            except OSError:
                data = b""
            await under_way.put((asyncio.get_running_loop().time() + self.delay_s, data))
