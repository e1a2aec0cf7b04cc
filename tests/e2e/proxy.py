"""A TCP proxy that can go silent without a word, as a network does whose other end is gone."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

_BLOCK = 64 * 1024


class Proxy:
    """Forwards TCP connections on loopback to a unix socket, in threads of its own."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def freeze(self) -> None:
        """Forward nothing, and close nothing: connections are half open, and new ones get no answer."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Forward again, and first what was sent meanwhile: it arrives late, as it may in a network."""
        self._flowing.set()

    def stop(self) -> None:
        self.thaw()
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was stopped
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                self._ends += [near, far]
                far.connect(str(self._target))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), name="proxy", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_BLOCK):
                self._flowing.wait()
                sink.sendall(data)
            self._flowing.wait()
            sink.shutdown(socket.SHUT_RDWR)
