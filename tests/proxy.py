"""A TCP proxy on loopback that can go silent without a word, or close every connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_BLOCK = 64 * 1024


@dataclass(eq=False)
class _Link:
    """One connection through the proxy; nothing passes while `flowing` is not set."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter | None = None
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self) -> None:
        for writer in (self.near, self.far):
            if writer is not None:
                writer.close()


class Proxy:
    """Forwards connections on loopback to a port there or to a unix socket, in a thread of its own."""

    def __init__(self, target: int | Path) -> None:
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
        self._server = self._do(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Close everything."""
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def freeze(self) -> None:
        """Forward nothing any more, and tell nobody: connections are half open, new ones too."""
        self._do(self._set(forwarding=False))

    def thaw(self, *, resume: bool) -> None:
        """Forward new connections again. Old ones go on where they were, or stay silent for good."""
        self._do(self._set(forwarding=True, resume=resume))

    def cut(self) -> int:
        """Close every connection; how many they were."""
        return self._do(self._cut())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _set(self, *, forwarding: bool, resume: bool = False) -> None:
        self._forwarding = forwarding
        for link in self._links:
            if not forwarding:
                link.flowing.clear()
            # One that was never connected on has lost nothing: it is new to the other side.
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
            # Either end may close first; the other is then closed too, but not while the network is silent.
            pumps = [
                asyncio.create_task(_pump(link, reader, link.far)),
                asyncio.create_task(_pump(link, far_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
        except OSError:
            pass  # Redis is down: the client learns it by its connection being closed
        except asyncio.CancelledError:
            pass  # the proxy stops
        finally:
            link.close()
            self._links.discard(link)
            self._tasks.discard(task)


async def _pump(link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_BLOCK):
            await link.flowing.wait()
            writer.write(data)
            await writer.drain()
    await link.flowing.wait()
