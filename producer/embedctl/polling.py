"""Waiting in an event loop: a few threads that all jobs share look at jobs; between two looks a task has no thread.

What ends the pause between two looks is an event of the job, which one thread hears for all tasks, or the time.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import cache, partial
from typing import TypeVar

from embedctl.daemons import DaemonThreads
from embedctl.listening import Listener, Listening
from embedctl.store import JobStatus
from embedctl.store.connection import answers_by
from embedctl.waiting import FIRST_LOOK_S, LOOK_EVERY_S, Progress, Waiter
from embedctl_config.errors import BrokerUnavailable, EmbedctlError
from embedctl_config.patience import REDIS, Outage

T = TypeVar("T")

THREADS = 16
#: A task that has waited for some time looks again after this part of it, within these bounds (seconds), if nothing
#: happened to its job.
_PAUSE_PART = 1 / 8
_LONGEST_PAUSE_S = 5.0


class NotYet(Exception):
    """Raised in a thread instead of waiting: the task waits, without the thread.

    Args:
        timeout_s: most seconds.
        only_end: whether it waits for the job's end alone.
    """

    def __init__(self, timeout_s: float, *, only_end: bool) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self.only_end = only_end


class PollingWaiter(Waiter):
    """Looks at a job and never waits: it raises NotYet instead, and BrokerUnavailable at once.

    Args:
        waiter: waits for the same job.
    """

    def __init__(self, waiter: Waiter) -> None:
        super().__init__(waiter.job_id, waiter.broker, sealed_with=waiter.sealed_with, seen=waiter.seen)

    def ask(self, question: Callable[[], T], deadline: float | None = None) -> T:
        """Ask once."""
        try:
            return question()
        except BrokerUnavailable as error:
            self.note_outage(error)
            raise

    def next_event(self, seen: str, timeout_s: float, deadline: float | None = None, *, only_end: bool = False) -> str:
        """Run the reaper if a round is due, and raise NotYet."""
        self.reap(deadline)
        raise NotYet(timeout_s, only_end=only_end)


class ProgressRelay:
    """Takes a job's last status from a thread to the event loop.

    Args:
        progress: called there.
        is_asked: whether somebody wants a status every second.
    """

    def __init__(self, progress: Progress | None = None, *, is_asked: bool = False) -> None:
        self._progress = progress
        self.is_asked = is_asked
        self._status: JobStatus | None = None

    def __call__(self, status: JobStatus) -> None:
        """Take a status, in the thread."""
        self._status = status

    def deliver(self) -> None:
        """Call `progress` with the last status, in the event loop, unless it has been called with that already."""
        if self._progress is not None and self._status is not None:
            self._progress(self._status)
        self._status = None


async def eventually(
    waiter: Waiter,
    look: Callable[[], T],
    relay: ProgressRelay,
    deadline: float | None = None,
    *,
    only_end: bool = False,
) -> T:
    """Look again and again until there is something to see, also while Redis is full, or away for a time.

    Args:
        waiter: of the job that is looked at.
        look: called in a thread; asks with a PollingWaiter, and so raises NotYet instead of waiting.
        relay: is given the job's status by `look`.
        deadline: by the monotonic clock; a look after it does not raise NotYet.
        only_end: whether there is nothing to see before the job's end; a new job is not looked at before its first
            event then.

    Raises:
        BrokerUnavailable, WaitTimeout: as :func:`embedctl.patience.patiently`.
    """
    began = time.monotonic()
    longest_s = min(_LONGEST_PAUSE_S, waiter.broker.settings.lease_s / 3)  # the reaper is to run meanwhile
    last = waiter.seen
    if only_end and waiter.is_new(deadline):
        last = await _next_event(waiter, last, FIRST_LOOK_S, only_end=True)

    async def once() -> T | NotYet:
        try:
            seen: T | NotYet = await in_shared_thread(partial(_answered_by, deadline, look))
        except NotYet as not_yet:
            seen = not_yet
        except EmbedctlError:
            relay.deliver()
            raise
        relay.deliver()
        return seen

    while True:
        seen = await REDIS.acall(once, BrokerUnavailable, failed=Outage(deadline))
        if not isinstance(seen, NotYet):
            return seen
        pause_s = seen.timeout_s
        if not relay.is_asked and pause_s >= LOOK_EVERY_S:
            pause_s = max(pause_s, min(longest_s, (time.monotonic() - began) * _PAUSE_PART))
        left_s = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        last = await _next_event(waiter, last, min(pause_s, longest_s, left_s), only_end=seen.only_end)


async def _next_event(waiter: Waiter, seen: str, timeout_s: float, *, only_end: bool) -> str:
    """Wait for a job's next event, or until the time is over; see :meth:`Waiter.next_event`."""
    loop = asyncio.get_running_loop()
    heard: asyncio.Future[None] = loop.create_future()
    listening = Listening(waiter.job_id, seen, time.monotonic() + timeout_s, partial(_tell, loop, heard), only_end)
    listener: Listener = waiter.broker.listener
    try:
        if listener.add(listening):
            await in_shared_thread(partial(_answered_by, listening.until, listener.hurry))
        with suppress(TimeoutError):
            await asyncio.wait_for(heard, listening.until - time.monotonic())
    finally:
        listener.remove(listening)
    return listening.seen


def _tell(loop: asyncio.AbstractEventLoop, heard: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_resolve, heard)


def _resolve(heard: asyncio.Future[None]) -> None:
    if not heard.done():
        heard.set_result(None)


def _answered_by(deadline: float | None, look: Callable[[], T]) -> T:
    with answers_by(deadline):
        return look()


@cache
def _threads() -> DaemonThreads:
    """Not the loop's own threads, so that embedctl and the application's `to_thread` never wait for each other.

    They are daemons: a Redis that does not answer must not keep a process from ending.
    """
    return DaemonThreads(THREADS, "embedctl")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of its parent's threads


async def in_shared_thread(work: Callable[[], T]) -> T:
    """Do what takes one round trip or a few. A task that is cancelled does not wait for it."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), copy_context().run, work)


def in_own_thread(work: Callable[[], T]) -> Future[T]:
    """Do what may take long. The thread is a daemon: texts that never come must not keep a process from ending."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  (the task that awaits it gets it)
            done.set_exception(error)

    threading.Thread(target=partial(copy_context().run, run), name="embedctl-submit", daemon=True).start()
    return done
