"""Turns of connections, which wait for each other by client, and those that read too little."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from embedctl_gateway.serving.connections import LEAST_READ_BYTES, Crowd, TimedProtocol


class One:
    """A connection that notes its turns."""

    tenant = ""

    def __init__(self, loop: asyncio.AbstractEventLoop, whose: str, log: list[str]) -> None:
        self.loop = loop
        self.whose = whose
        self._log = log

    def go_on(self) -> None:
        self._log.append(self.whose)


def test_a_client_with_many_connections_has_no_more_turns_than_others() -> None:
    log: list[str] = []

    async def ask() -> None:
        loop, crowd = asyncio.get_running_loop(), Crowd()
        for whose in ["eve"] * 20 + ["mallory"] * 3 + ["bob"]:
            one: Any = One(loop, whose, log)
            if crowd.has_turn(one):
                one.go_on()
        while len(log) < 24:
            await asyncio.sleep(0)
            if len(log) == 13:  # who comes in the middle waits for nobody
                late: Any = One(loop, "late", log)
                assert crowd.has_turn(late)

    asyncio.run(ask())
    assert log[:3] == ["eve", "mallory", "bob"]
    assert log[3:7] == ["eve", "mallory", "eve", "mallory"]
    assert log[7:] == ["eve"] * 17


class Transport:
    """A connection whose client has so many bytes to read, and is given no more."""

    def __init__(self, unread: int) -> None:
        self.unread = unread

    def get_write_buffer_size(self) -> int:
        return self.unread


@pytest.mark.parametrize(("read_at_once", "is_enough"), [(1, False), (LEAST_READ_BYTES // 2, True)])
def test_a_client_that_reads_a_little_now_and_then_reads_too_little(read_at_once: int, *, is_enough: bool) -> None:
    connection: Any = TimedProtocol.__new__(TimedProtocol)
    connection.transport, connection._unread, connection._read = Transport(10**7), 10**7, 0
    moved = []
    for _ in range(4):
        connection.transport.unread -= read_at_once
        moved.append(connection._has_moved())
    assert any(moved) == is_enough
