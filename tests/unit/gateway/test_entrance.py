"""Connections come in at a pace, and have turns of the event loop beside all else."""

from __future__ import annotations

import asyncio
import errno
import selectors
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from embedctl_gateway.serving import entrance
from embedctl_gateway.serving.entrance import AT_ONCE, Entrance, FewAtATime


def test_all_files_that_are_ready_have_the_same_number_of_turns() -> None:
    clients: dict[int, str] = {}
    with ExitStack() as opened, FewAtATime(clients) as selector:
        for number in range(5 * AT_ONCE):
            one, other = (opened.enter_context(each) for each in socket.socketpair())
            other.send(b"x")
            selector.register(one, selectors.EVENT_READ, number)
        turns: Counter[int] = Counter()
        for _ in range(10):
            found = selector.select()
            assert len(found) == AT_ONCE
            turns.update(key.data for key, _ in found)
        assert turns == dict.fromkeys(range(5 * AT_ONCE), 2)
        late, _ = (opened.enter_context(each) for each in socket.socketpair())
        selector.register(late, selectors.EVENT_WRITE, "late")  # who comes later does not wait for all of them
        assert "late" in [key.data for key, _ in selector.select()]
        clients.update(dict.fromkeys((key.fd for key in selector.get_map().values() if key.data != "late"), "eve"))
        assert all("late" in [key.data for key, _ in selector.select()] for _ in range(3))  # nor for one client's
        for key in list(selector.get_map().values()):
            selector.unregister(key.fileobj)
        assert selector._turns == {}


class Listener(socket.socket):
    """Has no room for a connection a number of times."""

    lacking = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.lacking:
            self.lacking -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Made(asyncio.Protocol):
    def __init__(self, noted: Callable[[], None]) -> None:
        self._noted = noted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._noted()
        transport.close()


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_flood_of_connections_leaves_turns_to_others_and_all_come_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: int
) -> None:
    monkeypatch.setattr(entrance, "_FULL_S", 0.0)
    turn, made = 0, Counter[int]()

    async def watch(listener: Listener) -> None:
        nonlocal turn
        way_in = Entrance(listener, lambda: Made(lambda: made.update([turn])))
        way_in.open()
        while made.total() < 50:
            turn += 1
            await asyncio.sleep(0)
        way_in.close()

    with (
        ExitStack() as opened,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FewAtATime({}))) as runner,
    ):
        listener = opened.enter_context(Listener())
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        listener.setblocking(False)
        for _ in range(50):
            opened.enter_context(socket.create_connection(listener.getsockname()))
        listener.lacking = lacking
        runner.run(watch(listener))
    assert max(made.values()) == 1
    assert [each.message for each in caplog.records] == ["no connection can be accepted: Too many open files"] * lacking
