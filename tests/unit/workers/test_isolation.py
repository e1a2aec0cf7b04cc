"""Who may be in a worker at the same time: any chunks, or one by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from embedctl_workers.serving.isolation import Room
from tests.support.waiting import PATIENCE_S, eventually

#: Long enough for a thread that is not held back to be seen to go on.
A_MOMENT_S = 0.1


class Guest:
    """A thread that enters, perhaps asks to be alone, and stays until told to leave."""

    def __init__(self, room: Room, *, alone: bool = False, fails: bool = False) -> None:
        self._room, self._alone, self._fails = room, alone, fails
        self._ask, self._leave = threading.Event(), threading.Event()
        self.inside, self.gone = threading.Event(), threading.Event()
        self.cleared: list[bool] = []
        self._thread = threading.Thread(target=self._visit, daemon=True)
        self._thread.start()

    def _visit(self) -> None:
        with suppress(RuntimeError), self._room:
            self.inside.set()
            if self._alone:
                self._ask.wait(PATIENCE_S)
                self.cleared.append(self._room.clear())
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


Enter = Callable[..., Guest]


@pytest.fixture
def enter() -> Iterator[Enter]:
    room, guests = Room(), list[Guest]()

    def enter(**how: bool) -> Guest:
        guests.append(Guest(room, **how))
        return guests[-1]

    yield enter
    for guest in guests:
        guest.release()


def stays_outside(guest: Guest) -> bool:
    return not guest.inside.wait(A_MOMENT_S)


def still_asks(guest: Guest) -> bool:
    time.sleep(A_MOMENT_S)
    return not guest.cleared


def test_several_may_be_inside_at_once(enter: Enter) -> None:
    guests = [enter() for _ in range(5)]
    assert all(guest.inside.wait(PATIENCE_S) for guest in guests)


def test_who_is_by_itself_already_has_the_room_at_once() -> None:
    room = Room()
    with room:
        assert room.clear()


def test_to_be_alone_is_to_wait_until_the_others_have_left(enter: Enter) -> None:
    first, second, loner = enter(), enter(), enter(alone=True)
    assert all(guest.inside.wait(PATIENCE_S) for guest in (first, second, loner))
    loner.ask()
    assert still_asks(loner)
    first.leave()
    assert still_asks(loner)
    second.leave()
    eventually(lambda: loner.cleared == [True])


def test_nobody_enters_while_one_is_alone_or_waits_to_be(enter: Enter) -> None:
    other, loner = enter(), enter(alone=True)
    assert other.inside.wait(PATIENCE_S)
    assert loner.inside.wait(PATIENCE_S)
    loner.ask()
    assert still_asks(loner)
    late = enter()
    assert stays_outside(late)
    other.leave()
    eventually(lambda: loner.cleared == [True])
    assert stays_outside(late)
    loner.leave()
    assert late.inside.wait(PATIENCE_S)


def test_of_two_that_want_it_alone_the_second_is_told_to_go_away(enter: Enter) -> None:
    first, second = enter(alone=True), enter(alone=True)
    assert first.inside.wait(PATIENCE_S)
    assert second.inside.wait(PATIENCE_S)
    first.ask()
    assert still_asks(first)
    second.ask()
    eventually(lambda: second.cleared == [False])
    second.leave()
    eventually(lambda: first.cleared == [True])


def test_once_the_first_has_left_the_second_may_have_it(enter: Enter) -> None:
    first = enter(alone=True)
    first.ask()
    eventually(lambda: first.cleared == [True])
    second = enter(alone=True)
    assert stays_outside(second)
    first.leave()
    second.ask()
    eventually(lambda: second.cleared == [True])


@pytest.mark.parametrize("alone", [True, False])
def test_who_leaves_by_an_error_has_left(enter: Enter, alone: bool) -> None:
    failing = enter(alone=alone, fails=True)
    failing.ask()
    assert failing.inside.wait(PATIENCE_S)
    failing.leave()
    after = enter(alone=True)
    after.ask()
    eventually(lambda: after.cleared == [True])


def test_who_waited_in_vain_holds_nobody_back() -> None:
    room = Room()
    entered = threading.Event()

    def enter() -> None:
        with room:
            entered.set()

    with room:
        room.clear()
        waiting = threading.Thread(target=enter, daemon=True)
        waiting.start()
        assert not entered.wait(A_MOMENT_S)
    assert entered.wait(PATIENCE_S)
    waiting.join(PATIENCE_S)
    with room:
        assert room.clear()


def test_it_is_never_shared_however_many_come_and_go() -> None:
    room, lock = Room(), threading.Lock()
    inside, alone, seen = 0, 0, list[tuple[int, int]]()

    def visit(number: int) -> None:
        nonlocal inside, alone
        for turn in range(50):
            with room:
                with lock:
                    inside += 1
                    seen.append((inside, alone))
                cleared = (number + turn) % 3 == 0 and room.clear()
                if cleared:
                    with lock:
                        alone += 1
                        seen.append((inside, alone))
                    time.sleep(0.0001)
                with lock:
                    alone -= cleared
                    inside -= 1

    threads = [threading.Thread(target=visit, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert any(alone for _, alone in seen)
    assert all(inside == 1 for inside, alone in seen if alone)
