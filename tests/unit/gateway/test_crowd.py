"""Turns of connections, which wait for each other by client, and those that read too little."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from embedctl_gateway.serving.connections import LEAST_READ_BYTES, Crowd, TimedProtocol


class One:
    """A connection that notes its turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop, whose: str, log: list[str], *, is_known: bool = True) -> None:
        self.loop = loop
        self.whose = whose
        self.tenant = whose if is_known else ""
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


class Timer:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop whose time passes as things are due, while its process computes for 5 ms after each turn."""

    def __init__(self) -> None:
        self.now, self.turns, self.count = 0.0, 0, 0
        self.due: list[tuple[float, int, Timer, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 0.005 * self.turns

    def call_later(self, pause_s: float, call: Callable[..., None], *args: Any) -> Timer:
        self.count += 1
        timer = Timer()
        heapq.heappush(self.due, (self.now + pause_s, self.count, timer, call, args))
        return timer

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.call_later(0.001, call, *args)

    def run(self, crowd: Crowd, asking: Sequence[str]) -> float:
        """How long it takes until the last of these connections has had its turn."""
        log: list[str] = []
        for whose in asking:
            one: Any = One(self, whose, log, is_known=whose != "probe")  # type: ignore[arg-type]
            if crowd.has_turn(one):
                one.go_on()
        while len(log) < len(asking):
            self.step()
            self.turns = len(log)
        return self.now

    def step(self) -> None:
        """Do what is due next."""
        self.now, _, timer, call, args = heapq.heappop(self.due)
        if not timer.is_cancelled:
            call(*args)


@pytest.mark.parametrize(("other", "least_s", "most_s"), [("bob", 0.5, 0.8), ("probe", 0.0, 0.3), ("eve", 0.0, 0.3)])
def test_who_waits_for_turns_has_half_of_a_cpu_if_other_tenants_ask(
    monkeypatch: pytest.MonkeyPatch, other: str, least_s: float, most_s: float
) -> None:
    """What a turn costs is known after a tenth of a second."""
    loop = Loop()
    monkeypatch.setattr("embedctl_gateway.serving.connections.time", loop)
    assert least_s <= loop.run(Crowd(), [*["eve"] * 100, other]) < most_s


@pytest.mark.parametrize(("answered_at", "least_s", "most_s"), [(0.01, 0.01, 0.013), (9.0, 0.05, 0.055)])
def test_a_round_is_held_while_one_who_waits_for_nothing_is_answered(
    monkeypatch: pytest.MonkeyPatch, answered_at: float, least_s: float, most_s: float
) -> None:
    loop, log = Loop(), list[str]()
    monkeypatch.setattr("embedctl_gateway.serving.connections.time", loop)
    bobs: list[Any] = [One(loop, "bob", log) for _ in range(2)]  # type: ignore[arg-type]
    crowd, eves = Crowd(), [One(loop, "eve", log) for _ in range(3)]  # type: ignore[arg-type]
    assert crowd.has_turn(bobs[0])
    for bob in bobs:
        crowd.know(bob, "bob")
    waiting: list[Any] = [*eves]
    assert [crowd.has_turn(eve) for eve in waiting] == [True, False, False]
    for bob in bobs:
        loop.call_later(answered_at, crowd.answered, bob)
    while not log:
        loop.step()
    assert least_s <= loop.now < most_s
    while len(log) < 2:
        loop.step()
    for _ in range(len(loop.due)):
        loop.step()
    assert log == ["eve"] * 2


def test_the_first_pause_is_no_longer_for_the_time_without_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, crowd = Loop(), Crowd()
    monkeypatch.setattr("embedctl_gateway.serving.connections.time", loop)
    loop.now = 10.0
    assert loop.run(crowd, ["bob", "eve", "eve"]) < 10.01


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
