"""What comes from a queue and is no bell is dropped; what instrumented programs add to a bell is not. The events
of tasks are sent together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from embedctl_config.keys import TASK
from embedctl_workers.serving.messages import MAX_BODY_BYTES, MAX_HEADERS_LENGTH, CheckingConsumer, flaw_of

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
