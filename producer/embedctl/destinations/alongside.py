"""Draining a job while its records are submitted: otherwise both would wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Self

from embedctl.destinations.draining import Interrupted
from embedctl.queueing.broker import Broker
from embedctl.queueing.listening import in_own_thread
from embedctl.waiting.waiter import Waiter

#: How long a submission that failed waits for the thread (seconds). What it has not made durable stays in Redis.
_END_S = 10.0

#: Moves a job's results to where they go, until the job has ended, or the second argument tells that no more is wanted.
Drain = Callable[[Waiter, Callable[[], bool]], object]


class Alongside:
    """Drains a job in a thread for as long as the block lasts, from :meth:`begin` on. Without `drain`, nothing is
    drained."""

    def __init__(self, broker: Broker, drain: Drain | None) -> None:
        self._broker, self._drain = broker, drain
        self._over = threading.Event()
        self._drained: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._drained is not None:
            # After a submission that went well, the same process drains on: it must not meet its own thread.
            wait([self._drained], None if error is None else _END_S)

    def begin(self, job_id: str) -> None:
        if self._drain is not None and self._drained is None:
            self._drained = in_own_thread(partial(self._run, job_id, self._drain))

    def check(self) -> None:
        """Raise the error that ended the drain, if there is one."""
        if self._drained is not None and self._drained.done():
            self._drained.result()

    def _run(self, job_id: str, drain: Drain) -> None:
        with suppress(Interrupted):
            drain(Waiter(job_id, self._broker), self._over.is_set)
