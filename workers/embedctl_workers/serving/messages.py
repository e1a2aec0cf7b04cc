"""What a worker receives from its queues, checked before anything else reads or logs it, and the events that it sends.

Celery inflates, decodes and logs whatever a message holds. A bell is small, so any other message is dropped with one
line that quotes nothing of it: a program that may publish must not use up a worker's memory or fill its log.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import kombu.compression
from celery.events import EventDispatcher
from celery.worker.consumer import Consumer

from embedctl_config.keys import TASK

log = logging.getLogger(__name__)

#: A bell's body has about 100 bytes.
MAX_BODY_BYTES = 16 * 1024
#: Most characters of all headers of a message together, names included.
MAX_HEADERS_LENGTH = 16 * 1024
#: Longest string among a message's headers. Instrumented programs add theirs, and OpenTelemetry's `baggage` may have
#: 8,192 characters.
_MAX_HEADER = 8 * 1024
_MAX_HEADERS = 64
#: The events of tasks, which Flower shows, are sent together, this long after the first of them (seconds). One message
#: for each event would take a fifth of the worker's time for a small chunk, while its caller waits.
_EVENTS_WAIT_S = 0.1


class CheckingConsumer(Consumer):
    """Celery's consumer, but it drops messages that are no bells before anything else reads them, and sends the
    events of tasks together."""

    connection_errors: tuple[type[Exception], ...]
    hub: Any
    _flush_events: Callable[[], None]
    #: When the sending of events was last arranged, by the monotonic clock.
    _arranged = float("-inf")

    def create_task_handler(self, *args: Any, **options: Any) -> Callable[[Any], None]:
        """The function that is called with each message, on the consumer's thread."""
        handle: Callable[[Any], object] = super().create_task_handler(*args, **options)

        def on_message(message: Any) -> None:
            flaw = flaw_of(message.headers, message.body)
            if flaw:
                self._drop(message, flaw)
            else:
                handle(message)

        return on_message

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Celery calls this for a message that it can't read, and would log all its headers."""
        self._drop(message, f"it can't be read ({type(exc).__name__})")

    def on_send_event_buffered(self) -> None:  # type: ignore[override]  # its stubs say that it returns a function
        """Celery calls this after each event of a task, in the thread that it happened in."""
        now = time.monotonic()
        # Not a flag: the timers are cleared when the connection is lost.
        if self.hub and now - self._arranged >= _EVENTS_WAIT_S:
            self._arranged = now
            self.hub.call_soon(self._send_events_later)

    def shutdown(self) -> None:
        self._flush_events()
        super().shutdown()

    def _send_events_later(self) -> None:
        self.hub.call_later(_EVENTS_WAIT_S, self._flush_events)

    def _drop(self, message: Any, flaw: str) -> None:
        log.warning("a message that is no bell was dropped: %s", flaw)
        message.ack_log_error(log, self.connection_errors)


class OneTryDispatcher(EventDispatcher):
    """Sends each event once. One that fails is kept, and goes out with those that follow the next connection.

    Celery has its heartbeat sent until that succeeds. While Redis is away, the worker's main thread would stay there
    and hear neither of a lost connection nor of SIGTERM.

    Celery's event of a task's start is left out: at that time it is not known which chunk it is. The task sends it.
    """

    def send(self, type: str, *args: Any, retry: bool = False, **fields: Any) -> Any:  # noqa: A002  (Celery's own name)
        return None if type == "task-started" and "args" not in fields else super().send(type, *args, **fields)


def send_event(worker: Any, kind: str, **facts: Any) -> None:
    """Send an event of a task together with those of Celery's worker."""
    dispatcher = worker.consumer.event_dispatcher
    if dispatcher is not None:  # it is, while a lost connection is replaced
        dispatcher.send(kind, **facts)


def flaw_of(headers: Any, body: Any) -> str:
    """Why a message can't be a bell, in words that quote nothing of it; empty if it may be one."""
    if not isinstance(body, bytes | str) or len(body) > MAX_BODY_BYTES:
        return f"its body is no text of at most {MAX_BODY_BYTES} bytes"
    if not isinstance(headers, dict) or _length(headers) > MAX_HEADERS_LENGTH:
        return "its headers are not those of a bell"
    if headers.get("compression"):
        return "it is compressed"
    if headers.get("task") != TASK or not isinstance(headers.get("id"), str):
        return "it names another task, or none"
    return ""


def inflate_nothing() -> None:
    """Refuse to inflate anything that this process receives: kombu would do that before a message can be checked.

    Bells are never compressed, and a message of 400 KB may inflate to 400 MB.
    """
    for content_type in kombu.compression.encoders():
        kombu.compression.register(_refuse, _refuse, content_type)


def _refuse(body: object) -> bytes:
    raise ValueError("bells are not compressed")


def _length(value: Any) -> float:
    """Characters of all strings of a value, names included; infinite if a string, list or dict is too long."""
    if isinstance(value, dict):
        value = [*value, *value.values()] if len(value) <= _MAX_HEADERS else None
    elif isinstance(value, list):
        value = value if len(value) <= _MAX_HEADERS else None
    elif isinstance(value, str):
        return len(value) if len(value) <= _MAX_HEADER else math.inf
    else:
        return 0
    return math.inf if value is None else sum(map(_length, value))
