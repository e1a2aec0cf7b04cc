"""Waiting for one job: never for something that cannot come, nor longer than the timeout, nor in silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from embedctl.common.notices import Reminder
from embedctl.queueing.broker import Broker
from embedctl.queueing.listening import in_shared_thread, may_wait
from embedctl.queueing.reaper import Reaper
from embedctl.queueing.retrying import TimeLimit, retry_redis
from embedctl.queueing.routing import missing_worker, with_workers
from embedctl.store import JobState, JobStatus
from embedctl.store.reading import Event
from embedctl_config import keys
from embedctl_config.errors import (
    BrokerUnavailable,
    ChunkFilesUnavailable,
    EmbedctlError,
    JobCancelled,
    JobLost,
    JobNotFound,
    JobStalled,
    WaitTimeout,
)
from embedctl_config.retry import EVENT, REDIS, RetryLimit

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Takes a job's status whenever something happened, and every second.
Progress = Callable[[JobStatus], None]

#: The status is read at least this often while a caller waits (seconds).
LOOK_EVERY_S = 1.0
#: Who has just submitted a job waits so long for its end before the first look at its status (seconds). A small job has
#: often ended by then.
FIRST_LOOK_S = 0.25
#: A job is new for this long (seconds).
_NEW_S = 5.0
#: Who has just waited for a job's end knows its status for this long (seconds).
_KNOWN_S = 1.0


class NotYet(Exception):
    """Raised in a shared thread instead of waiting: the task waits, without the thread."""


class Waiter:
    """Asks Redis about one job, and waits for it: in the calling thread, or with :meth:`eventually` in a task. It asks
    again while Redis is away or full (:func:`retry_redis`), and runs the reaper while it waits, as workers do.

    `sealed_with` and `seen` are as for :class:`Job`. `pausing` is told of a Redis that is away or full before each
    pause.
    """

    def __init__(
        self,
        job_id: str,
        broker: Broker,
        *,
        sealed_with: int | None = None,
        seen: str | None = None,
        pausing: Callable[[BrokerUnavailable], None] = lambda _: None,
    ) -> None:
        self.job_id = job_id
        self.broker = broker
        self.sealed_with = sealed_with
        self.seen = seen or "0"
        #: Whether the result of a job's first chunk is read with its status, and what was read of it.
        self.reads_result = False
        self.first_result: bytes | None = None
        #: The status that came with the last event.
        self.told: JobStatus | None = None
        self._reaper = Reaper.of_many(broker)
        self._longest_s = broker.settings.lease_s / 3  # of one wait: the reaper is to run meanwhile
        self._new_until = 0.0 if sealed_with is None else time.monotonic() + _NEW_S
        self._pausing = pausing
        self._looked = 0.0
        self._stalled_since: float | None = None
        self._ended: tuple[float, JobStatus] | None = None
        self._remind_of_workers = Reminder(log.warning)
        self._remind_of_redis = Reminder(log.warning)

    def status(self, *, recent: bool = False) -> JobStatus:
        """The job's status at this moment. Asks once. With `recent`, the number of live workers may be a second old."""
        facts = self._facts()
        if self.broker.remote is not None:
            return facts  # the gateway knows its workers
        return with_workers(self.broker.workers, facts, recent=recent)

    def ended_lately(self) -> JobStatus | None:
        """The status that a wait for the job's end has just returned. What is read of a job that is freed meanwhile
        will be missing."""
        if self._ended is None or time.monotonic() - self._ended[0] > _KNOWN_S:
            return None
        return self._ended[1]

    def forget(self) -> None:
        """This process changes the job: what is known of its end may not be so any more."""
        self._ended = None

    def _facts(self) -> JobStatus:
        told, self.told = self.told, None
        return told or self._asked()[0]

    def _events(self, seen: str, timeout_s: float) -> list[Event]:
        """The next events. What reads the job's result reads it with them."""
        if not self.reads_result:
            return self.broker.jobs.events(self.job_id, seen, timeout_s)
        self.told, events = self._asked(seen, timeout_s)
        return events

    def _asked(self, after: str | None = None, timeout_s: float = 0.0) -> tuple[JobStatus, list[Event]]:
        """The job's status, and perhaps its result, after the next events if it says after which."""
        try:
            if not self.reads_result:
                return self.broker.jobs.status(self.job_id), []
            status, self.first_result, events = self.broker.jobs.status_and_result(self.job_id, after, timeout_s)
            return status, events
        except JobLost:
            raise
        except JobNotFound as error:
            if self.sealed_with is None:
                raise
            raise JobNotFound(
                f"job {self.job_id} was made by this process, and Redis no longer knows it: it was discarded, its time "
                "to live ran out, or Redis lost its last writes. If you still need it, submit its corpus again."
            ) from error

    def ask(self, question: Callable[[], T], deadline: float | None = None) -> T:
        """The answer to a question that may be asked twice; see :func:`retry_redis` for the deadline and the errors."""
        if may_wait():
            return retry_redis(question, pausing=self.note_failure, deadline=deadline)
        try:
            return question()
        except BrokerUnavailable as error:
            self.note_failure(error)
            raise

    def next_event(self, seen: str, timeout_s: float, deadline: float | None = None, *, only_end: bool = False) -> str:
        """Run the reaper if a round is due, and wait for the job's next event, for a third of a lease at most. Returns
        the id of the last event, which is `seen` (`0` if the caller knows none) if no other came in time. With
        `only_end`, it passes over events after which the job goes on. Raises NotYet in a shared thread."""
        self.reap(deadline)  # before: afterwards, somebody waits for the answer
        if not may_wait():
            raise NotYet
        until = time.monotonic() + min(timeout_s, self._longest_s)
        while (left_s := until - time.monotonic()) > 0:
            events = self.ask(partial(self._events, seen, left_s), deadline)
            seen = events[-1].id if events else seen
            if not events or any(event.may_end or not only_end for event in events):
                break
        return seen

    def reap(self, deadline: float | None) -> None:
        self.ask(partial(self._reaper.round, deadline), deadline)

    def note_failure(self, error: BrokerUnavailable) -> None:
        """Redis, or the place of chunks outside of it, is away or full: the user is to know."""
        if not isinstance(error, ChunkFilesUnavailable):
            self._reaper.rest()  # the silence of owners means nothing
        self._remind_of_redis(f"job {self.job_id}: waits. {error}")
        self._pausing(error)

    def warn_of_missing_worker(self, status: JobStatus) -> None:
        self._remind_of_workers(missing_worker(status))

    def look(self, progress: Progress | None, deadline: float | None) -> JobStatus:
        """The job's status, passed to `progress`; without that, a missing worker is logged."""
        self._looked = time.monotonic()
        status = self.ask(partial(self.status, recent=True), deadline)
        (progress or self.warn_of_missing_worker)(status)
        return status

    def look_again(self, status: JobStatus, progress: Progress | None, deadline: float | None = None) -> JobStatus:
        """As :meth:`look`, but this status if the last look was a moment ago: who has many chunks to take sees the job
        go on meanwhile."""
        if time.monotonic() - self._looked <= LOOK_EVERY_S:
            return status
        return self.look(progress, deadline)

    def until_ended(self, limit: TimeLimit, progress: Progress | None, *, only_end: bool | None = None) -> JobStatus:
        """Wait until the job has ended. Raises as :meth:`until`. With `only_end`, `progress` needs no status at events
        after which the job goes on; so it is by default without `progress`."""
        only_end = progress is None if only_end is None else only_end
        status = self.until(lambda status: status.state.ended, limit, progress, only_end=only_end)
        self._ended = time.monotonic(), status
        return status

    def until_sealed(self, limit: TimeLimit, progress: Progress | None) -> JobStatus:
        """Wait until the job has all its records, or has ended. Raises as :meth:`until`, and JobCancelled."""

        def is_sealed(status: JobStatus) -> bool:
            refuse_cancelled(status)
            return status.original_chunks is not None or status.state.ended

        return self.until(is_sealed, limit, progress)

    def until(
        self,
        arrived: Callable[[JobStatus], bool],
        limit: TimeLimit,
        progress: Progress | None = None,
        *,
        only_end: bool = False,
    ) -> JobStatus:
        """Wait until something has `arrived`, by the job's status; that function raises what ends the wait. With
        `only_end`, it arrives only at the job's end. `progress` is called with each status. Raises as
        :meth:`Job.wait`."""
        deadline, seen = limit.deadline, self.seen
        if only_end and self.is_new(deadline):
            seen = self.next_event(seen, FIRST_LOOK_S, deadline, only_end=True)
        while True:
            status = self.look(progress, deadline)
            if arrived(status):
                return status
            self._check_prospects(status, deadline)
            left_s = self._left_s(status, limit)
            seen = self.next_event(seen, min(LOOK_EVERY_S, left_s), deadline, only_end=only_end)

    async def eventually(
        self, look: Callable[[], T], relay: Relay, deadline: float | None = None, *, only_end: bool = False
    ) -> T:
        """Look again and again until there is something to see, also while Redis is full, or away for a time. Raises as
        :func:`retry_redis`.

        `look` is called in a shared thread. It asks and waits with this waiter, which raises NotYet there, but not
        after the deadline (monotonic clock); and it gives the job's status to `relay`. With `only_end`, there is
        nothing to see before the job's end, and a new job is not looked at before its first event.
        """
        began, seen = time.monotonic(), self.seen
        next_event = partial(self.broker.listener.next_event, self.job_id, only_end=only_end)
        if only_end and self.is_new(deadline):
            seen = await next_event(seen, FIRST_LOOK_S)

        async def once() -> T:
            try:
                found = await in_shared_thread(look, deadline)
            except (NotYet, EmbedctlError):
                relay.deliver()
                raise
            relay.deliver()
            return found

        while True:
            try:
                return await REDIS.acall(once, BrokerUnavailable, failed=RetryLimit(deadline))
            except NotYet:
                now = time.monotonic()
            pause_s = LOOK_EVERY_S if relay.is_asked else max(LOOK_EVERY_S, EVENT.pause_s(now - began))
            left_s = self._longest_s if deadline is None else max(0.0, deadline - now)
            seen = await next_event(seen, min(pause_s, self._longest_s, left_s))

    def is_new(self, deadline: float | None) -> bool:
        """Whether this process has just submitted the job, and asks for the first time."""
        now = time.monotonic()
        is_new, self._new_until = now < self._new_until, 0.0
        return is_new and (deadline is None or deadline - now > FIRST_LOOK_S)

    def _check_prospects(self, status: JobStatus, deadline: float | None) -> None:
        """See that a job that has not ended still can. Seal it again if this process sealed it and Redis lost that."""
        if status.lost_chunks is not None:
            raise lost_chunks(status.id, *status.lost_chunks)
        if status.original_chunks is not None or status.state is not JobState.SUBMITTING:
            self._stalled_since = None
        elif self.sealed_with == status.chunks:
            self.ask(partial(self.broker.jobs.seal, self.job_id, status.chunks), deadline)
            log.warning("job %s: Redis had lost that the job is sealed; it is sealed again", self.job_id)
        elif not status.stalled or status.done + status.failed < status.records:
            self._stalled_since = None
        else:
            self._check_stalled(status, deadline)

    def _check_stalled(self, status: JobStatus, deadline: float | None) -> None:
        """All records of a stalled job are done: raise, unless another producer may still resume it."""
        now = time.monotonic()
        self._stalled_since = self._stalled_since or now
        if now - self._stalled_since <= keys.PRODUCER_LEASE_S:  # another producer may be about to take over
            return
        if self.ask(self.broker.connection.is_full, deadline):
            self._stalled_since = None  # a producer that waits for memory may not even be able to renew its lease
            return
        raise JobStalled(
            f"job {self.job_id} is incomplete: its producer died, or Redis lost its last writes. The "
            f"{status.records} submitted records are done. Submit the same corpus with --resume {self.job_id} or "
            "with its idempotency key, or cancel the job"
        )

    def _left_s(self, status: JobStatus, limit: TimeLimit) -> float:
        """Seconds until the deadline, which is not over."""
        if limit.deadline is None:
            return LOOK_EVERY_S
        left_s = limit.deadline - time.monotonic()
        if left_s <= 0:
            missing = missing_worker(status)
            raise WaitTimeout(
                f"job {self.job_id} is {status.state} after {limit.timeout:g} s: {status.done + status.failed} of "
                f"{status.records} records are done, and it goes on" + (f". {missing}" if missing else "")
            )
        return left_s


class Relay:
    """Takes a job's last status from a thread to `progress` in the event loop; `is_asked` if somebody wants one every
    second."""

    def __init__(self, progress: Progress | None = None, *, is_asked: bool = False) -> None:
        self._progress = progress
        self.is_asked = is_asked
        self._status: JobStatus | None = None

    def __call__(self, status: JobStatus) -> None:
        self._status = status

    def deliver(self) -> None:
        """Call `progress` with the last status, in the event loop, unless it has been called with that already."""
        if self._progress is not None and self._status is not None:
            self._progress(self._status)
        self._status = None


def refuse_cancelled(status: JobStatus) -> None:
    if status.state is JobState.CANCELLED:
        raise JobCancelled(f"job {status.id} was cancelled: it has no vectors")


def ended_by_budget(status: JobStatus) -> str:
    return (
        f"job {status.id} was ended by its error budget after {status.failed} failed records; `embedctl errors "
        f"{status.id}` lists them"
    )


def lost_chunks(job_id: str, first: int, last: int) -> JobLost:
    return JobLost(
        f"Redis lost chunks {first} to {last} of job {job_id}. Submit the same corpus with --resume {job_id} "
        "to repair it, or with its idempotency key."
    )
