"""The threads that serve all tasks of this process: a few ask Redis, and one hears the events of all their jobs in one
blocking read."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import closing, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

from embedctl.common.daemons import DaemonThreads
from embedctl.store.connection import Connection, answers_by
from embedctl.store.reading import Event, JobReader, events_in
from embedctl_config import keys
from embedctl_config.errors import BrokerUnavailable, EmbedctlError
from embedctl_config.retry import ASIDE, Policy, Streak

T = TypeVar("T")

#: The number of threads that ask, and how many of them ask for one client at once.
THREADS, _FOR_EACH = 16, 4
#: More threads than a process begins.
_MOST_OWN = 1_000_000
#: The number of threads that ask a gateway for events.
_ASKING = 64
_may_wait: ContextVar[bool] = ContextVar("may_wait", default=True)
#: A read of events ends after this time (ms), and the next one begins.
_BLOCK_MS = 1000
#: Most jobs in one read; the tasks of further ones look by themselves.
_MOST = 1000
#: Most events of a job in one answer. A task needs none of them but the last.
_MOST_EVENTS = keys.EVENTS_KEPT
#: It begins in a moment: another thread is about to send it.
_SOON = Policy(0.0005, 1.0)
#: The thread ends when nobody has waited for this long (seconds).
_IDLE_S = 2.0
#: A read that Redis may not have begun is to be ended: so often it is tried, in 0.13 s.
_TRIES = 9


@dataclass(eq=False, slots=True)
class Listening:
    """A task that waits for an event of a job, after the one that it has `seen` (an id; `0` if it knows none) and until
    a moment of the monotonic clock. With `only_end`, it passes over events after which the job goes on. `wake` is
    called once, in the thread, when the event has come."""

    job_id: str
    seen: str
    until: float
    wake: Callable[[], None]
    only_end: bool = False

    def hears(self, events: Iterable[Event]) -> bool:
        """Whether it is to be woken by these events. Those that are new are seen."""
        new = [event for event in events if _order(event.id) > _order(self.seen)]
        if new:
            self.seen = new[-1].id
        return any(event.may_end or not self.only_end for event in new)


class Listener:
    """Hears events. Its thread and its one connection exist only while somebody waits. Threads may share it, but only
    those of its `process`: a forked child has no such thread."""

    def __init__(self, connection: Connection) -> None:
        self.process = os.getpid()
        self._connection = connection
        self._changed = threading.Condition()
        self._waiting: dict[Listening, None] = {}
        self._runs = False
        self._trouble = Streak()
        #: The read that goes on, and Redis' number of the connection that it blocks.
        self._reads: int | None = None
        self._number = 0
        self._client_id = 0
        self._hurried: int | None = None

    def add(self, listening: Listening) -> bool:
        """Let a task wait. True if the caller is to :meth:`hurry` the thread, which does not know of it yet."""
        with self._changed:
            self._waiting[listening] = None
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="embedctl-events", daemon=True).start()
            self._changed.notify()
            return self._reads is not None and self._reads != self._hurried

    def remove(self, listening: Listening) -> None:
        with self._changed:
            self._waiting.pop(listening, None)

    async def next_event(self, job_id: str, seen: str, timeout_s: float, *, only_end: bool = False) -> str:
        """Wait in a task for a job's next event, as :class:`Listening` says. Returns the id of the last event, which is
        `seen` if there was no other."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Future[None] = loop.create_future()
        listening = Listening(job_id, seen, time.monotonic() + timeout_s, partial(_tell, loop, heard), only_end)
        hurrying: asyncio.Future[None] | None = None
        try:
            if self.add(listening):  # not awaited: the read may end by itself, with another job's event
                hurrying = asyncio.ensure_future(in_shared_thread(self.hurry, listening.until))
            with suppress(TimeoutError):
                await asyncio.wait_for(heard, timeout_s)
        finally:
            self.remove(listening)
            if hurrying is not None:
                hurrying.cancel()
        return listening.seen

    def hurry(self) -> None:
        """End the read that goes on, so that the next one includes who has come since. Asks Redis."""
        with self._changed:
            number = self._reads
            if number is None or number == self._hurried:
                return
            self._hurried = number
        _SOON.until(partial(self._is_ended, number), bool, tries=_TRIES)

    def _is_ended(self, number: int) -> bool:
        """End a read. True if it is over, or can't be ended."""
        with self._changed:
            client_id = self._client_id
            if self._reads != number:
                return True
        try:
            with self._connection.client() as client:
                return bool(client.client_unblock(client_id))
        except BrokerUnavailable:
            return True

    def _run(self) -> None:
        # The tasks look by themselves meanwhile, and see what is wrong.
        with suppress(Exception):
            ASIDE.call(self._listen, Exception, streak=self._trouble, sleep=self._is_left)

    def _is_left(self, pause_s: float) -> bool:
        """Pause after an error. True if nobody waits any more."""
        with self._changed:
            self._reads = None
            self._changed.wait_for(lambda: False, pause_s)
            self._runs = bool(self._waiting)
            return not self._runs

    def _somebody_waits(self) -> bool:
        """Wait for somebody who waits. False if nobody came, and the thread is to end."""
        with self._changed:
            self._runs = bool(self._changed.wait_for(lambda: self._waiting, _IDLE_S))
            return self._runs

    def _listen(self) -> None:
        """Read events until nobody has waited for a while."""
        with self._connection.client() as shared, closing(shared.client()) as client:
            self._client_id = int(client.client_id())
            while self._somebody_waits():
                if streams := self._begin():
                    answer = client.xread(streams, block=_BLOCK_MS, count=_MOST_EVENTS)
                    self._trouble.end()
                    self._end(events_in(answer))

    def _begin(self) -> dict[str, str]:
        """The streams to read, each from the event after those that all of its tasks know."""
        with self._changed:
            now = time.monotonic()
            for over in [each for each in self._waiting if each.until + _BLOCK_MS / 1000 < now]:
                del self._waiting[over]  # its event loop has ended without it
            streams: dict[str, str] = {}
            for each in self._waiting:
                name = keys.events(each.job_id)
                if name in streams:
                    streams[name] = min(streams[name], each.seen, key=_order)
                elif len(streams) < _MOST:
                    streams[name] = each.seen
            self._number += 1
            self._reads = self._number if streams else None
            return streams

    def _end(self, found: dict[bytes, list[Event]]) -> None:
        with self._changed:
            self._reads = None
            for each in list(self._waiting) if found else ():
                if each.hears(found.get(keys.events(each.job_id).encode(), ())):
                    del self._waiting[each]
                    each.wake()


class AskingListener(Listener):
    """Hears the events of jobs that a gateway holds: for each task that waits, a thread asks."""

    def __init__(self, jobs: JobReader) -> None:
        self.process = os.getpid()
        self._jobs = jobs
        self._threads = DaemonThreads(_ASKING, "embedctl-events")

    async def next_event(self, job_id: str, seen: str, timeout_s: float, *, only_end: bool = False) -> str:
        def ask() -> str:
            last = seen
            while (left_s := until - time.monotonic()) > 0:
                events = self._jobs.events(job_id, last, left_s)
                last = events[-1].id if events else last
                if not events or any(event.may_end or not only_end for event in events):
                    break
            return last

        until = time.monotonic() + timeout_s
        try:
            # Not longer, even if all threads ask for others, or the gateway is away: the task looks by itself.
            return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(self._threads, ask), timeout_s)
        except TimeoutError:
            return seen
        except EmbedctlError:
            await asyncio.sleep(max(0.0, until - time.monotonic()))
            return seen


def _tell(loop: asyncio.AbstractEventLoop, heard: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(lambda: None if heard.done() else heard.set_result(None))


@cache
def _threads() -> DaemonThreads:
    """Not the loop's own threads, so that embedctl and the application's `to_thread` never wait for each other. They
    are daemons: a Redis that does not answer must not keep a process from ending."""
    return DaemonThreads(THREADS, "embedctl", _FOR_EACH)


@cache
def _own_threads() -> DaemonThreads:
    """Daemons too: texts that never come must not keep a process from ending."""
    return DaemonThreads(_MOST_OWN, "embedctl-submit")


@cache
def _waiting_threads() -> DaemonThreads:
    return DaemonThreads(THREADS, "embedctl-wait", _FOR_EACH)


for _each in (_threads, _own_threads, _waiting_threads):
    os.register_at_fork(after_in_child=_each.cache_clear)  # a child has none of its parent's threads


def may_wait() -> bool:
    """Whether the caller may wait for an event, or for a Redis that is away: not in a thread that tasks share."""
    return _may_wait.get()


async def in_shared_thread(work: Callable[[], T], deadline: float | None = None) -> T:
    """Do what takes one round trip or a few. A task that is cancelled does not wait for it. Redis is asked nothing
    twice after the deadline (monotonic clock)."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), copy_context().run, _shared, work, deadline)


def _shared(work: Callable[[], T], deadline: float | None) -> T:
    _may_wait.set(False)  # of this call's own context
    with answers_by(deadline):
        return work()


def in_own_thread(work: Callable[[], T]) -> Future[T]:
    """Do what may take long, at once, whatever else goes on. Threads are kept, because the start of one holds up the
    caller on a busy machine."""
    return _own_threads().submit(copy_context().run, work)


def if_few_wait(work: Callable[[], T]) -> Future[T] | None:
    """Wait for something in a thread of its own, which hears of it sooner than the one that hears for all tasks; None,
    and nothing is done, if enough threads do."""
    return _waiting_threads().submit_if_room(copy_context().run, work)


def _order(event_id: str) -> tuple[int, int]:
    first, _, second = event_id.partition("-")
    return int(first), int(second or 0)
