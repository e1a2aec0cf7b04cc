"""What a worker receives from its queues, checked before anything else reads or logs it: bells for its one task, and
Celery's remote control, reduced to its queries; and the events that it sends.

Celery inflates, decodes and logs whatever a message holds. A bell is small, so any other message is dropped with one
line that quotes nothing of it: a program that may publish must not use up a worker's memory or fill its log. Anyone who
can query a worker still cannot command it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import kombu.compression
from celery import Celery, Task
from celery.events import EventDispatcher
from celery.worker.consumer import Consumer
from celery.worker.control import Panel

from embedctl_config.keys import TASK, of_queue
from embedctl_workers.serving.runner import ChunkRunner

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
#: What `celery inspect` and Flower ask. No query ends, changes or redirects a worker or its bells.
QUERIES = frozenset(
    """
    active active_queues clock conf enable_events heartbeat hello ping query_task registered report reserved revoked
    scheduled stats
    """.split()  # noqa: SIM905  (as a list it would be a screen of its own)
)


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


def remove_commands() -> None:
    """Remove all other remote commands from this process: SIGTERM stops a worker, `embedctl cancel` ends a job."""
    for command in set(Panel.data) - QUERIES:
        del Panel.data[command]


def register(
    app: Celery, runner: ChunkRunner, model_of_queue: Mapping[str, str], send_event: Callable[..., object]
) -> None:
    """Have `runner` take chunks for the bells that `app` hears; each queue holds chunks for a model. `send_event` sends
    an event of a task."""

    # By default, Celery makes a backend in each thread, which reads files. Without file descriptors, that fails after
    # the bell was answered, and again as Celery handles that failure.
    @app.task(name=TASK, bind=True, typing=False, backend=app.backend)
    def encode(self: Task[Any, Any], /, *args: Any, **facts: Any) -> str:
        queue = (self.request.delivery_info or {}).get("routing_key")
        # A message may hold anything: nothing of it is used or logged.
        if not isinstance(queue, str) or queue not in model_of_queue:
            log.warning("a message that is no bell was dropped")
            return "no bell"

        def tell(words: str) -> None:
            """Flower shows to operators which chunk it is, and of what."""
            hardware, model = of_queue(queue)
            about = {"args": words, "kwargs": f"class {hardware}, model {model}"}
            send_event("task-started", uuid=self.request.id, name=TASK, **about)

        return runner.run(model_of_queue[queue], queue, tell)
