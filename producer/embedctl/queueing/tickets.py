"""Tickets: the Celery messages that say "look at chunk i of job J"."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from celery import Celery
from kombu import Connection
from kombu.exceptions import KombuError, OperationalError
from redis.exceptions import RedisError

from embedctl.store.connection import STALE_S
from embedctl_config import keys, wire
from embedctl_config.celery_app import TASK
from embedctl_config.errors import BrokerFull, BrokerRefused, BrokerUnavailable

#: Most tickets published in one round trip.
_BATCH = 500
#: The errors raised if tickets may not have been sent; those of kombu are caused by an error of redis-py.
_FAILURES = (KombuError, OperationalError, OSError, RedisError)
#: How often to try to connect, and by how much each pause grows (seconds): Celery's `task_publish_retry_policy`.
_TRIES, _STEP_S = 3, 0.2
#: Most idle connections kept for the next tickets.
_KEPT = 4


def in_words(job_id: str, chunk: int | str) -> str:
    """The chunk that a ticket names, in words."""
    return f"job {job_id}, chunk {chunk}"


def task_in_words(task_id: str) -> str | None:
    """The same from the id of a Celery task; None if the task is not a ticket."""
    job_id, _, rest = task_id.partition(".")
    chunk, dot, _ = rest.partition(".")
    return in_words(job_id, chunk) if dot and chunk.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A message that says "look at this chunk". Its facts are `version`, `sent_ms` (when it was first sent), and
    anything else that is said."""

    queue: str
    job_id: str
    chunk: int
    facts: Mapping[str, Any]

    @property
    def route(self) -> str:
        """The class and the model of the workers that take it, in words."""
        hardware, model = keys.of_queue(self.queue)
        return f"class {hardware}, model {model}"


class TicketSender:
    """Publishes tickets in batches. A lost or duplicated ticket is harmless, because the state is in the store. Tickets
    carry Redis' time in ms, approximately (`clock`), so that people see how long they waited. `explained` converts an
    error of redis-py into one of ours."""

    def __init__(
        self, app: Celery, clock: Callable[[], int], explained: Callable[[Exception], Exception] | None = None
    ) -> None:
        self._app = app
        self._clock = clock
        self._explained = explained
        # Celery's pool is shared by all applications of a process, but connections that are closed here must be ours.
        self._idle: list[Connection] = []
        self._used = time.monotonic()
        #: The only process that may use it: a child must not use its parent's connections and locks.
        self.process = os.getpid()

    def send(self, queue: str, job_id: str, chunks: Sequence[int]) -> None:
        """Publish one ticket per chunk; raises BrokerUnavailable if Redis can't be reached. Some tickets may not have
        been sent; the reaper sends them later."""
        if chunks:
            self.forward(self.written(queue, job_id, chunks))

    def written(self, queue: str, job_id: str, chunks: Sequence[int]) -> list[Ticket]:
        """One ticket per chunk, to be published together with others; see :meth:`send`."""
        facts = {"version": wire.VERSION, "sent_ms": self._clock()}
        return [Ticket(queue, job_id, chunk, facts) for chunk in chunks]

    def forward(self, tickets: Sequence[Ticket]) -> None:
        """Publish tickets unchanged; raises BrokerUnavailable as for :meth:`send`."""
        if not tickets:
            return
        idle = bool(self._idle)
        try:
            try:
                self._publish(tickets)
            except _FAILURES:
                # An idle connection may be closed or lead to a replica by now. Chunks are issued once, so without
                # another try they would wait for `reissue_s`.
                if not idle:
                    raise
                self._publish(tickets)
        except _FAILURES as error:
            raise self._unavailable(error) from error

    def prepare(self) -> None:
        """Import all that sending takes, without connecting. A service does so before it says that it is healthy: what
        is missing then ends it, and not its first request."""
        _ = self._app.connection_for_write().transport  # is imported when it is asked for

    def open(self) -> None:
        """Connect as :meth:`send` does, and raise as it does; the connection stays for the next tickets."""
        try:
            with self._connection() as connection:
                _connect(connection)
        except _FAILURES as error:
            raise self._unavailable(error) from error

    def _publish(self, tickets: Sequence[Ticket]) -> None:
        with self._connection() as connection:
            _connect(connection)
            producer: Any = self._app.amqp.Producer(connection)  # its stubs do not know `batch` of kombu 5.7 yet
            with producer.batch(_BATCH):
                for ticket in tickets:
                    self._send(ticket, producer)

    def _unavailable(self, error: Exception) -> BrokerUnavailable:
        cause = error if isinstance(error, RedisError) else error.__cause__
        if self._explained is not None and isinstance(cause, RedisError):
            explained = self._explained(cause)
            if isinstance(explained, BrokerFull | BrokerRefused):
                return explained
            return BrokerUnavailable(f"tickets can't be sent: {explained}")
        return BrokerUnavailable(f"tickets can't be sent: {error}")

    def _send(self, ticket: Ticket, producer: Any) -> None:
        self._app.send_task(
            TASK,
            args=(ticket.job_id, ticket.chunk),
            kwargs=dict(ticket.facts),
            queue=ticket.queue,
            producer=producer,
            # After a lost connection kombu would go on with the closed channel, which is an AttributeError: `forward`
            # tries once more on a new connection.
            retry=False,
            # Operators read this in Flower. The suffix distinguishes tickets of the same chunk.
            task_id=f"{ticket.job_id}.{ticket.chunk}.{secrets.token_hex(3)}",
            ignore_result=True,  # else Celery makes a backend in each thread that sends
            argsrepr=in_words(ticket.job_id, ticket.chunk),
            kwargsrepr=ticket.route,
        )

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection for one thread. An error closes it and the idle ones; the next one resolves Redis again."""
        before, self._used = self._used, time.monotonic()
        if self._used - before > STALE_S:
            self.close()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._app.connection_for_write()
        try:
            yield connection
        except BaseException:
            connection.release()
            self.close()
            raise
        if len(self._idle) < _KEPT:
            self._idle.append(connection)
        else:
            connection.release()

    def close(self) -> None:
        """Close the connections that no thread uses at this moment. The next tickets open a new one."""
        with suppress(IndexError):
            while True:
                self._idle.pop().release()


def _connect(connection: Connection) -> None:
    pauses: Any = {"interval_start": 0, "interval_step": _STEP_S}  # its stubs say int
    connection.ensure_connection(max_retries=_TRIES, **pauses)
