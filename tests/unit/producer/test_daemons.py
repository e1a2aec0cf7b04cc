"""Threads that several clients share."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from typing import Any

import pytest

from embedctl.common.daemons import DaemonThreads, doing_for, for_nobody
from tests.support.waiting import eventually


def test_the_work_of_one_client_leaves_threads_to_others() -> None:
    threads, over = DaemonThreads(4, "shared", each=2), threading.Event()
    began: list[str] = []

    def work() -> str:
        began.append("eve")
        assert over.wait(60)
        return "done"

    def submit(whose: str, work: Any) -> Future[Any]:
        context = Context()
        context.run(doing_for.set, whose)
        return context.run(threads.submit, work)

    waiting = [submit("eve", work) for _ in range(10)]
    waiting[5].cancel()
    eventually(lambda: len(began) == 2, what="as much work as a client may have")
    contexts = {whose: Context() for whose in ("eve", "bob", "")}
    for whose, context in contexts.items():
        context.run(doing_for.set, whose)
        assert context.run(threads.has_room) == (whose != "eve")
    for whose in ("bob", "", "bob"):
        assert submit(whose, lambda: "other").result(60) == "other"
    assert began == ["eve"] * 2
    over.set()
    assert [each.result(60) for each in waiting if not each.cancelled()] == ["done"] * 9
    assert submit("eve", lambda: "again").result(60) == "again"


def test_work_for_all_is_no_clients() -> None:
    context = Context()
    context.run(doing_for.set, "eve")
    assert context.run(lambda: for_nobody().run(doing_for.get)) == ""
    assert context.run(doing_for.get) == "eve"


def test_room_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, over, has_room = DaemonThreads(1, "shared"), threading.Event(), DaemonThreads.has_room

    def slowly(self: DaemonThreads) -> bool:
        found = has_room(self)
        over.wait(0.1)
        return found

    monkeypatch.setattr(DaemonThreads, "has_room", slowly)
    with ThreadPoolExecutor(3) as callers:
        given = [callers.submit(threads.submit_if_room, over.wait, 60) for _ in range(3)]
    over.set()
    assert sorted(each.result() is None for each in given) == [False, True, True]
