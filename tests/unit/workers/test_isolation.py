"""Which threads may be in a worker at the same time: any, or one that is isolated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from embedctl_workers.serving.isolation import Isolation
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


def test_isolation_is_never_shared_however_many_come_and_go() -> None:
    isolation, lock = Isolation(), threading.Lock()
    inside, alone, seen = 0, 0, list[tuple[int, int]]()

    def visit(number: int) -> None:
        nonlocal inside, alone
        for turn in range(50):
            with isolation:
                with lock:
                    inside += 1
                    seen.append((inside, alone))
                isolated = (number + turn) % 3 == 0 and isolation.isolate()
                if isolated:
                    with lock:
                        alone += 1
                        seen.append((inside, alone))
                    time.sleep(0.0001)  # lets the others run
                with lock:
                    alone -= isolated
                    inside -= 1

    threads = [threading.Thread(target=visit, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert any(alone for _, alone in seen)
    assert all(inside == 1 for inside, alone in seen if alone)
