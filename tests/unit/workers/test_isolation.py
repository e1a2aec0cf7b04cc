"""Threads of a worker: which may be in it at the same time, and how their chunks look to its watchdog."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.serving.chunk_encoding import ChunkEncoding, SharedDevice
from embedctl_workers.serving.claimed import ClaimedChunk
from embedctl_workers.serving.in_hand import Held, InHand, Isolation
from embedctl_workers.serving.telemetry import Telemetry
from tests.support.chunks import chunk_of
from tests.support.waiting import PATIENCE_S, eventually

#: Long enough for a thread that is not held back to be seen to go on. A busy machine may hide one, and fails no test.
A_MOMENT_S = 0.1


class Visitor:
    """A thread that enters, perhaps isolates itself, and stays until told to leave."""

    def __init__(self, isolation: Isolation, *, alone: bool = False, fails: bool = False) -> None:
        self._isolation, self._alone, self._fails = isolation, alone, fails
        self._ask, self._leave = threading.Event(), threading.Event()
        self.inside, self.gone = threading.Event(), threading.Event()
        self.isolated: list[bool] = []
        self._thread = threading.Thread(target=self._visit, daemon=True)
        self._thread.start()

    def _visit(self) -> None:
        with suppress(RuntimeError), self._isolation:
            self.inside.set()
            if self._alone:
                self._ask.wait(PATIENCE_S)
                self.isolated.append(self._isolation.isolate())
            self._leave.wait(PATIENCE_S)
            if self._fails:
                raise RuntimeError
        self.gone.set()

    def ask(self) -> None:
        self._ask.set()

    def leave(self) -> None:
        self._leave.set()
        assert self.gone.wait(PATIENCE_S)

    def release(self) -> None:
        self._ask.set()
        self._leave.set()
        self._thread.join(PATIENCE_S)


Enter = Callable[..., Visitor]


@pytest.fixture
def enter() -> Iterator[Enter]:
    isolation, visitors = Isolation(), list[Visitor]()

    def enter(**how: bool) -> Visitor:
        visitors.append(Visitor(isolation, **how))
        return visitors[-1]

    yield enter
    for visitor in visitors:
        visitor.release()


def stays_outside(visitor: Visitor) -> bool:
    return not visitor.inside.wait(A_MOMENT_S)


def still_asks(visitor: Visitor) -> bool:
    time.sleep(A_MOMENT_S)
    return not visitor.isolated


def test_no_thread_enters_while_one_is_isolated_or_waits_to_be(enter: Enter) -> None:
    other, lone = enter(), enter(alone=True)
    assert other.inside.wait(PATIENCE_S)
    assert lone.inside.wait(PATIENCE_S)
    lone.ask()
    assert still_asks(lone)
    late = enter()
    assert stays_outside(late)
    other.leave()
    eventually(lambda: lone.isolated == [True])
    assert stays_outside(late)
    lone.leave()
    assert late.inside.wait(PATIENCE_S)


def test_of_two_that_want_to_be_isolated_the_second_is_refused(enter: Enter) -> None:
    first, second = enter(alone=True), enter(alone=True)
    assert first.inside.wait(PATIENCE_S)
    assert second.inside.wait(PATIENCE_S)
    first.ask()
    assert still_asks(first)
    second.ask()
    eventually(lambda: second.isolated == [False])
    second.leave()
    eventually(lambda: first.isolated == [True])


@pytest.mark.parametrize("alone", [True, False])
def test_a_thread_that_leaves_by_an_error_has_left(enter: Enter, alone: bool) -> None:
    failing = enter(alone=alone, fails=True)
    failing.ask()
    assert failing.inside.wait(PATIENCE_S)
    failing.leave()
    after = enter(alone=True)
    after.ask()
    eventually(lambda: after.isolated == [True])


BATCH_S = 0.02


class Device(DummyBackend):
    """A dummy that joins batches, each of which takes the same time by a clock that stands still between them.

    Attributes:
        quiet_s: for how long the quietest chunk had made no progress at the end of any batch.
    """

    def __init__(self) -> None:
        super().__init__(dim=4, poison=True, seconds_per_batch=BATCH_S)
        self.joins = self.budget_by_sum = True
        self.ahead = 1
        self.clock_s = self.quiet_s = 0.0
        self.in_hand = InHand(now=lambda: self.clock_s)

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        self.clock_s += BATCH_S
        if found := self.in_hand.quietest():
            self.quiet_s = max(self.quiet_s, found[1])
        return super().forward(tokens, rows)


def encoding_with(in_hand: InHand, hurrying: threading.Event | None = None) -> ChunkEncoding:
    device = SharedDevice(in_hand, Telemetry(), threading.Event(), hurrying or threading.Event(), now_ms=lambda: 1)
    return ChunkEncoding(["m"], cast(Any, None), device, Isolation())


def test_a_chunk_that_waits_while_another_finds_its_bad_records_is_not_quiet() -> None:
    """The other has the device for 1.5 s, and finishes a part every 20 ms; this chunk has begun before that."""
    device = Device()
    encoder, in_hand = ChunkEncoder(device, 64), device.in_hand
    encoding = encoding_with(in_hand)

    def encode(number: int, texts: list[str]) -> Any:
        held = Held("job", number, str(number), "m")
        in_hand.take(held)
        try:
            return encoding.encode(
                ClaimedChunk(held, cast(Any, SimpleNamespace(options={})), encoder, b"", chunk_of(*texts), None)
            )
        finally:
            in_hand.drop(held)

    with ThreadPoolExecutor(2) as threads:
        bad = threads.submit(encode, 0, [f"a{row} fail-encoder" for row in range(24)])
        long = threads.submit(encode, 1, [f"w{row} b" for row in range(800)])
        assert len(bad.result().errors) == 24
        assert not long.result().errors
    assert device.clock_s > 1.0
    assert device.quiet_s < 0.5
