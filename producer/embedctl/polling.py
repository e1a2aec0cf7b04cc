"""Waiting in an event loop: a few threads that all jobs share look at jobs; between two looks a task has no thread."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import cache, partial
from typing import TypeVar

from embedctl.daemons import DaemonThreads
from embedctl.patience import Outage, cut_short
from embedctl.store import JobStatus
from embedctl.store.connection import answers_by
from embedctl.waiting import Progress, Waiter
from embedctl_config.errors import BrokerUnavailable, EmbedctlError

T = TypeVar("T")

THREADS = 16
#: A task that has waited for some time pauses for this part of it, within these bounds (seconds).
_PAUSE_PART = 1 / 8
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class NotYet(Exception):
    """Raised in a thread instead of waiting: the task waits, without the thread."""


class PollingWaiter(Waiter):
    """Looks at a job and never waits: it raises NotYet instead, and BrokerUnavailable at once.

    Args:
        waiter: waits for the same job.
    """

    def __init__(self, waiter: Waiter) -> None:
        super().__init__(waiter.job_id, waiter.broker, sealed_with=waiter.sealed_with)

    def ask(self, question: Callable[[], T], deadline: float | None = None) -> T:
        """Ask once."""
        try:
            return question()
        except BrokerUnavailable as error:
            self.note_outage(error)
            raise

    def next_event(self, seen: str, timeout_s: float, deadline: float | None = None) -> str:
        """Run the reaper if a round is due, and raise NotYet."""
        self.reap(deadline)
        raise NotYet


class ProgressRelay:
    """Takes a job's last status from a thread to the event loop.

    Args:
        progress: called there.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._status: JobStatus | None = None

    def __call__(self, status: JobStatus) -> None:
        """Take a status, in the thread."""
        self._status = status

    def deliver(self) -> None:
        """Call `progress` with the last status, in the event loop, unless it has been called with that already."""
        if self._progress is not None and self._status is not None:
            self._progress(self._status)
        self._status = None


async def eventually(look: Callable[[], T], relay: ProgressRelay, deadline: float | None = None) -> T:
    """Look again and again until there is something to see, also while Redis is full, or away for a time.

    Args:
        look: called in a thread; asks with a PollingWaiter, and so raises NotYet instead of waiting.
        relay: is given the job's status by `look`.
        deadline: by the monotonic clock; a look after it does not raise NotYet.

    Raises:
        BrokerUnavailable, WaitTimeout: as :func:`embedctl.patience.patiently`.
    """
    began = time.monotonic()
    outage: Outage | None = None
    while True:
        try:
            seen = await in_shared_thread(partial(_answered_by, deadline, look))
        except NotYet:
            outage = None
        except BrokerUnavailable as error:
            relay.deliver()
            outage = outage or Outage(deadline)
            outage.check(error)
        except EmbedctlError:
            relay.deliver()
            raise
        else:
            relay.deliver()
            return seen
        relay.deliver()
        pause = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, (time.monotonic() - began) * _PAUSE_PART))
        await asyncio.sleep(cut_short(pause, deadline))


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
