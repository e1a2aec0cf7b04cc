"""The part of Redis' protocol that the explorer needs: many commands in one write, many answers in one read."""

from __future__ import annotations

import socket
from typing import Any


class Refused(Exception):
    """Redis answered with an error."""


class Wire:
    """One connection to a unix socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(path)
        self._reader = self._socket.makefile("rb", buffering=1 << 16)

    def ask(self, *commands: list[Any]) -> list[Any]:
        """The answers to these commands. An error is an answer of type :class:`Refused`."""
        self._socket.sendall(b"".join(map(_packed, commands)))
        return [self._answer() for _ in commands]

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _answer(self) -> Any:
        line = self._reader.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else self._reader.read(size + 2)[:-2]
        if kind == b"*":
            return [self._answer() for _ in range(int(rest))]
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        return Refused(rest.decode())


def _packed(command: list[Any]) -> bytes:
    parts = [b"*%d\r\n" % len(command)]
    for part in command:
        data = part if isinstance(part, bytes) else str(part).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
