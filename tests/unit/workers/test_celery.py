"""What Celery does in a worker: it drops what is no bell, sends events together, and runs chunks in warmed threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, cast

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from embedctl_config.keys import TASK
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.serving.messages import MAX_BODY_BYTES, MAX_HEADERS_LENGTH, CheckingConsumer, flaw_of, register
from embedctl_workers.serving.runner import ChunkRunner
from embedctl_workers.serving.threads import warmed_threads

HEADERS = {"task": TASK, "id": "1", "lang": "py"}


@pytest.mark.parametrize("more", [{"baggage": "k=v," * 2048}, {"baggage": ["k=v," * 1500, {"traceparent": "00-1"}]}])
def test_a_bell_may_have_as_much_baggage_as_opentelemetry_allows(more: dict[str, object]) -> None:
    assert flaw_of({**HEADERS, **more}, b"[]") == ""


@pytest.mark.parametrize(
    "more",
    [
        {"baggage": "x" * (8 * 1024 + 1)},
        {"x" * (8 * 1024 + 1): 1},
        {str(i): "x" * 1024 for i in range(MAX_HEADERS_LENGTH // 1024)},
        {"deep": [["x" * 4096] * 2] * 3},
        {"list": [0] * 65},
        {str(i): 0 for i in range(64)},
    ],
)
def test_headers_are_bounded_one_by_one_and_together(more: dict[str, object]) -> None:
    assert flaw_of({**HEADERS, **more}, b"[]") == "its headers are not those of a bell"


@pytest.mark.parametrize(
    ("headers", "body"),
    [(HEADERS, b"x" * (MAX_BODY_BYTES + 1)), (HEADERS, None), (None, b""), ({**HEADERS, "compression": "gzip"}, b"")],
)
def test_what_is_no_bell_has_a_flaw(headers: object, body: object) -> None:
    assert flaw_of(headers, body)


class Hub:
    """Celery's event loop, whose time stands still until it is told."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        call()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        assert delay_s > 0
        self.timers.append(call)

    def ring(self) -> None:
        rung, self.timers = self.timers, []
        for call in rung:
            call()


class Dispatcher:
    def __init__(self) -> None:
        self.flushes = 0

    def flush(self) -> None:
        self.flushes += 1


def test_the_events_of_tasks_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    consumer: Any = CheckingConsumer.__new__(CheckingConsumer)
    consumer.hub, consumer.event_dispatcher = hub, dispatcher = Hub(), Dispatcher()

    for _ in range(10):
        consumer.on_send_event_buffered()
        now[0] += 0.005
    assert (len(hub.timers), dispatcher.flushes) == (1, 0)
    hub.ring()
    assert dispatcher.flushes == 1

    now[0] += 0.1
    consumer.on_send_event_buffered()
    hub.timers.clear()  # as Celery does when the connection is lost
    now[0] += 0.2
    consumer.on_send_event_buffered()
    hub.ring()
    assert dispatcher.flushes == 2


class Warmed(DummyBackend):
    """Notes the threads that it was warmed up in, and that they came one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []
        self._turn = threading.Lock()
        self.fails = False

    def warm_up_thread(self) -> None:
        assert self._turn.acquire(blocking=False)
        self.threads.append(threading.get_ident())
        self._turn.release()
        if self.fails:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("fails", [False, True])
def test_each_thread_is_warmed_up_once_before_a_chunk(*, fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    backend = Warmed()
    backend.fails = fails
    pool: Any = warmed_threads([backend, DummyBackend()])(4)
    pool.start()
    executor: ThreadPoolExecutor = pool.executor
    assert sorted(backend.threads) == sorted(each.ident or 0 for each in executor._threads)
    assert len(set(backend.threads)) == 4
    assert caplog.text.count("a thread is not warmed up") == (4 if fails else 0)
    assert executor.submit(int, "1").result() == 1
    pool.stop()


def test_a_thread_opens_no_file_to_end_its_first_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery(set_as_current=False)
    register(app, cast("ChunkRunner", None), {}, print)
    app.finalize()

    def no_files(*_: Any) -> NoReturn:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(app, "_get_backend", no_files)

    def handle() -> object:
        task = app.tasks[TASK]
        return build_tracer(TASK, task, app=app)("an id", [], {}, {"id": "an id", "delivery_info": {}})

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handle).result().info is None  # type: ignore[attr-defined]
