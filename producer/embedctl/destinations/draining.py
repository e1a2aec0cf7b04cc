"""Moves a job's results out of Redis: each batch is made durable elsewhere, and only then released."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Generic, Self, TypeVar

from embedctl.destinations.held import Held, Taken
from embedctl.destinations.loop import Callbacks, Delivered, Taker, run
from embedctl.destinations.released import refuse_database
from embedctl.destinations.right import DrainRight
from embedctl.destinations.unreleased import Unreleased
from embedctl.queueing.broker import Broker
from embedctl.queueing.listening import in_own_thread
from embedctl.store import BatchFacts, JobState, PartFacts
from embedctl.waiting.waiter import Waiter, ended_by_budget, refuse_cancelled
from embedctl_config.errors import JobFailed

#: How long a submission that failed waits for the thread (seconds). What it has not made durable stays in Redis.
_END_S = 10.0

#: Moves a job's results to where they go, until the job has ended, or the second argument tells that no more is wanted.
Move = Callable[[Waiter, Callable[[], bool]], object]

H = TypeVar("H", bound=Held)


class Interrupted(Exception):
    """Raised when the caller of a drain wants no more."""


class Drain(Taker[Taken], Generic[H]):
    """Drains one job to the place of a name, by one process at a time, until the job has ended and Redis holds none of
    its results."""

    def __init__(self, waiter: Waiter, name: str, callbacks: Callbacks) -> None:
        self._waiter, self._name, self._callbacks = waiter, name, callbacks
        self._job_id, self._broker, self._drains = waiter.job_id, waiter.broker, waiter.broker.drains
        self._high_water = waiter.ask(waiter.broker.results_high_water)
        self._right = DrainRight(waiter, self._high_water)
        self._source = Unreleased(waiter, callbacks.progress, self._check_wanted, self._release)
        self._held: H | None = None
        self.done = Delivered()

    def drained(self) -> Delivered:
        """Raises as :meth:`Job.deliver`, and Interrupted."""
        refuse_cancelled(self._source.status)
        refuse_database(self._drains, self._job_id, self._drains.state(self._job_id), but=self._name)
        self._state = self._right.take()
        with self._right.kept(), self._opened():
            self._state = self._right.take(self._name)
            status = self._source.look()
            self._begin()
            self._drains.unlink_drained(self._job_id, status.chunks)
            run(lambda: self._source.all(self._state.next_chunk), self, lambda: self._source.status)
        ended = self._source.status
        if ended.stopped_by is not None and ended.state is JobState.FAILED:
            raise JobFailed(f"{ended_by_budget(ended)}. What is done is in {self._name}")
        return self.done

    def take(self, chunk: Taken) -> None:
        self._check_wanted()
        most = max(1, self._high_water // 2)  # the other half is for workers, while this one is made durable
        if self._held is not None and not self._held.has_room_for(chunk, most_bytes=most):
            self._release()
        self._held = self._held or self._begun(of_corpus=chunk.of_corpus)
        self._add(self._held, chunk)

    def _release(self) -> None:
        """Make what is held durable, note it, and free its results, in this order."""
        held, self._held = self._held, None
        if held is None or not held.chunks:
            return
        name, facts = self._durable(held)
        self._right.release(name, facts, held)
        self._state = self._state.after(held.range)
        self._tell(held)
        self._check_wanted()

    def _check_wanted(self) -> None:
        if self._callbacks.stopped():
            raise Interrupted

    @abstractmethod
    def _opened(self) -> AbstractContextManager[None]:
        """Open the place, and keep others out of it; nothing there is changed before the block begins. Whatever ends
        the block, what is open is closed."""

    @abstractmethod
    def _begin(self) -> None:
        """See that what earlier drains have made durable is still there."""

    @abstractmethod
    def _begun(self, *, of_corpus: bool) -> H: ...

    @abstractmethod
    def _add(self, held: H, chunk: Taken) -> None:
        """Add a chunk, and release what is held once it is enough."""

    @abstractmethod
    def _durable(self, held: H) -> tuple[str, PartFacts | BatchFacts]:
        """Make what is held durable; returns the name under which Redis notes it, and what it notes."""

    @abstractmethod
    def _tell(self, held: H) -> None:
        """Tell the caller of what has just been released."""


class Alongside:
    """Drains a job in a thread for as long as the block lasts, from :meth:`begin` on. Without `move`, nothing is
    drained."""

    def __init__(self, broker: Broker, move: Move | None) -> None:
        self._broker, self._move = broker, move
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
        if self._move is not None and self._drained is None:
            self._drained = in_own_thread(partial(self._run, job_id, self._move))

    def check(self) -> None:
        """Raise the error that ended the drain, if there is one."""
        if self._drained is not None and self._drained.done():
            self._drained.result()

    def _run(self, job_id: str, move: Move) -> None:
        with suppress(Interrupted):
            move(Waiter(job_id, self._broker), self._over.is_set)
