"""Adding chunks to a job: one producer at a time, no faster than workers and Redis take them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

from embedctl.chunk_files import Upload
from embedctl.common.notices import Reminder
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.queueing.retrying import TimeLimit, is_redis_away
from embedctl.queueing.routing import no_worker_for
from embedctl.store import Added, JobState, JobStatus, JobStore
from embedctl.store.lease import Lease
from embedctl.waiting.waiter import LOOK_EVERY_S, Waiter, lost_chunks, refuse_cancelled
from embedctl_config import keys, wire
from embedctl_config.errors import (
    BrokerUnavailable,
    ChunkFilesUnavailable,
    CorpusChanged,
    EmbedctlError,
    JobError,
    JobLost,
    JobNotFound,
    QuotaExceeded,
    WaitTimeout,
)
from embedctl_config.retry import POLL
from embedctl_config.wire import ChunkInput

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Called during a submission with the number of records added so far, and with what the producer waits for, or "".
SubmitProgress = Callable[[int, str], None]
#: A submission that takes no longer than this renews no right (seconds).
_SHORT_S = 0.1
#: What is noted of a tenant's jobs is corrected once in so many questions for room, which are a second apart.
_CORRECTED_EVERY = 10
_ANOTHER_PRODUCER, _WORKERS = "another producer of this job", "workers to make room"


class Submission:
    """Adds chunks to one job as its only live producer. A context manager: inside it, no other producer may add. The
    `token` is that of this producer, which may have begun to add with it."""

    def __init__(
        self,
        broker: Broker,
        job: JobStatus,
        progress: SubmitProgress | None,
        limit: TimeLimit,
        token: str,
    ) -> None:
        self.broker = broker
        self._limit = limit
        self._waiter = Waiter(job.id, broker, seen="$", pausing=lambda error: self._report(_store_of(error)))
        self._remind = Reminder(log.warning)
        self._job = job
        self._job_id = job.id
        self._progress = progress
        self._token = token
        #: How many chunks and records were added or existed already.
        self.chunks = self._records = 0
        self._lease = Lease(self._renew, keys.PRODUCER_LEASE_S / 3, _SHORT_S)
        self._reaper: Reaper | None = None

    def __enter__(self) -> Self:
        self._lease.__enter__()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._lease.end()
        if error is not None and not isinstance(error, BrokerUnavailable) and not is_redis_away(error):
            with suppress(EmbedctlError):  # otherwise the lease runs out, only later
                self.broker.jobs.hold(self._job_id, self._token, lease_s=0)

    def add(self, chunk: ChunkInput) -> None:
        """Add the next chunk, or check that the job has it. Then wait for room.

        Raises:
            CorpusChanged: the job has another chunk in this place, or was sealed without it.
            JobFailed, JobStopped: its error budget, or a user, has ended it.
            JobCancelled, JobLost, BrokerUnavailable: it takes no more; the last two say how to resume.
            QuotaExceeded: this is the first chunk, and its tenant's limits leave no room. Later ones wait for room,
                unless it is known that there never will be.
            WaitTimeout: the time is over.
        """
        self._check_time()
        payload = wire.encode_input(chunk)
        upload = self._retried(partial(self.broker.jobs.upload, self._job, "in", self.chunks, payload))
        ask = partial(self._add, upload, wire.digest_of(payload), len(chunk))
        answer, waiting = self._alone(partial(self._within_limits, ask), lambda added: added[0] is not Added.HELD)
        if answer is Added.SEALED:
            raise CorpusChanged(f"job {self._job_id} ended after record {self._records - 1}; the corpus now has more")
        if answer is Added.STOPPED:
            raise self._retried(lambda: self.broker.jobs.why_stopped(self._job_id))
        if answer is Added.DIFFERS:
            raise CorpusChanged(self._first_difference(chunk))
        self.chunks += 1
        self._records += len(chunk)
        self._report()
        if waiting > self._retried(self.broker.high_water):
            self._wait_for_workers()

    def reopen(self) -> None:
        """If the job was stopped, open it again for its corpus. Raises as :meth:`add` does."""
        if self._job.state is JobState.STOPPED:
            resume = partial(self.broker.jobs.resume, self._job_id, self._token)
            self._alone(partial(self._retried, resume), bool)

    def seal(self) -> None:
        """Say that the job has all its chunks. Raises as :meth:`add` does."""
        hold = partial(self.broker.jobs.hold, self._job_id, self._token)
        self._alone(partial(self._retried, hold), bool)
        self._retried(lambda: self.broker.jobs.seal(self._job_id, self.chunks))

    def _add(self, upload: Upload, digest: bytes, rows: int) -> tuple[Added, int]:
        add = partial(self.broker.jobs.add, self._job_id, self.chunks, digest=digest, rows=rows, token=self._token)
        return add_chunk(self.broker.jobs, self._job, self.chunks, upload, add)

    def _alone(self, ask: Callable[[], T], is_alone: Callable[[T], bool]) -> T:
        """Ask until the job's other producer has ended, or its lease has run out. Raises WaitTimeout."""
        return POLL.until(ask, is_alone, waiting=partial(self._wait, _ANOTHER_PRODUCER))

    def _within_limits(self, ask: Callable[[], T]) -> T:
        """Ask until the limits of the job's tenant leave room. Raises QuotaExceeded if the job has no chunk, because
        then it waits only for the next second, and as :meth:`_check_goes_on` if there will be no room."""
        seen, asked = self._waiter.seen, 0
        while True:
            try:
                return self._retried(ask)
            except QuotaExceeded as error:
                if error.is_final:
                    raise
                is_rate = error.after_s > 0
                if not is_rate and asked % _CORRECTED_EVERY == 0:
                    self._retried(partial(self.broker.quotas.correct, error.tenant))
                if not is_rate and not self.chunks and not self._job.chunks:
                    return self._retried(ask)
                self._check_goes_on(self._retried(partial(self.broker.jobs.status, self._job_id)))
                self._wait(f"room within {error.limit} of tenant {error.tenant}")
            seen = self._next_event(seen)
            asked += 1

    def _next_event(self, seen: str) -> str:
        """Wait for the job's next event, one second at most. Raises as :meth:`_saying_how`."""
        return self._saying_how(partial(self._waiter.next_event, seen, LOOK_EVERY_S, self._limit.deadline))

    def _retried(self, ask: Callable[[], T]) -> T:
        """Ask Redis until it answers. Raises as :meth:`_saying_how`."""
        return self._saying_how(partial(self._waiter.ask, ask, self._limit.deadline))

    def _saying_how(self, wait: Callable[[], T]) -> T:
        """Wait for something. BrokerUnavailable and WaitTimeout say how to resume; JobLost is raised if Redis does not
        know the job any more."""
        try:
            return wait()
        except JobLost:
            raise
        except JobNotFound as error:
            raise JobLost(
                f"job {self._job_id} disappeared from Redis while it was submitted: it was discarded or lost. "
                "Submit its corpus again."
            ) from error
        except WaitTimeout as error:
            away = error.__cause__
            raise self._out_of_time(f": its submission waits for {_store_of(away)}. {away}") from away
        except BrokerUnavailable as error:
            raise type(error)(
                f"{error} Job {self._job_id} holds the first {self._records} records: resume with embedctl submit "
                f"CORPUS --resume {self._job_id}"
            ) from error

    def _wait(self, for_what: str) -> None:
        """Log and report what the submission waits for; raises WaitTimeout if the time is over."""
        self._check_time(f": its submission waits for {for_what}")
        self._remind(f"job {self._job_id}: its submission waits for {for_what}")
        self._report(for_what)

    def _check_time(self, why: str = "") -> None:
        if self._limit.deadline is not None and time.monotonic() >= self._limit.deadline:
            raise self._out_of_time(why)

    def _out_of_time(self, why: str) -> WaitTimeout:
        return WaitTimeout(
            f"job {self._job_id} has only the first {self._records} of its records after {self._limit.timeout:g} s{why}"
        )

    def _renew(self) -> bool:
        """Renew the producer's lease while the corpus is slow to give its next record, or Redis is slow to take it.
        This also runs the reaper: a corpus may take days to arrive while no worker runs, and then no other process
        keeps the job's first chunks from expiring."""
        try:
            self.broker.jobs.hold(self._job_id, self._token)
        except JobError:
            return False  # it is cancelled or gone; adding the next chunk raises that error
        if self._reaper is None:
            self._reaper = Reaper.of_many(self.broker)  # a short submission needs no reaper
        else:
            self._reaper.round()
        return True

    def _wait_for_workers(self) -> None:
        """Backpressure: wait until the job's waiting text is below the high water mark. Raises as
        :meth:`_check_goes_on`."""
        seen = self._waiter.seen
        while True:
            status = self._saying_how(partial(self._waiter.look, lambda _: None, self._limit.deadline))
            self._check_goes_on(status)
            if status.waiting_bytes <= self._retried(self.broker.high_water):
                return
            self._wait(_WORKERS if status.live_workers else f"{_WORKERS}. {no_worker_for(status)}")
            seen = self._next_event(seen)

    def _check_goes_on(self, status: JobStatus) -> None:
        refuse_cancelled(status)
        if status.stopped_by is not None:
            raise self._retried(lambda: self.broker.jobs.why_stopped(self._job_id))
        if status.lost_chunks is not None:
            raise lost_chunks(self._job_id, *status.lost_chunks)

    def _first_difference(self, chunk: ChunkInput) -> str:
        stored = self._stored_checksums()
        mine = chunk.row_checksums()
        differing = [row for row, (a, b) in enumerate(zip(stored, mine, strict=False)) if a != b]
        row = differing[0] if differing else min(len(stored), len(mine))
        return (
            f"the corpus changed: record {chunk.first + row} is not the one that job {self._job_id} was begun with. "
            "Restore it, or submit it as a new job with another idempotency key."
        )

    def _stored_checksums(self) -> list[int]:
        result = self.broker.jobs.result(self._job_id, self.chunks)
        if result is not None:
            return list(wire.decode_result(result).checksums)
        stored = self.broker.jobs.input(self._job_id, self.chunks)
        return [] if stored is None else wire.decode_input(stored).row_checksums()

    def _report(self, waiting_for: str = "") -> None:
        if self._progress is not None:
            self._progress(self._records, waiting_for)


def add_chunk(
    jobs: JobStore, job: JobStatus, chunk: int, upload: Upload, add: Callable[[bytes], tuple[Added, int]]
) -> tuple[Added, int]:
    """Add a chunk to a job, and put its bytes where the job keeps them. The job is as it was when its producer began,
    and `add` is :meth:`JobStore.add` of a value for this chunk."""

    def put() -> tuple[Added, int]:
        answer = add(upload.value())
        upload.noted()
        return answer

    if job.data is None or chunk >= job.chunks:
        return put()
    # The job was begun before. Its place takes longer to be asked than Redis, so nothing is put there in vain.
    answer = add(b"")
    if answer[0] is Added.SKIPPED and jobs.drop_gone(job.id, chunk):
        answer = add(b"")
    return put() if answer[0] is Added.WANTED else answer


def _store_of(error: BaseException | None) -> str:
    return "chunk_files" if isinstance(error, ChunkFilesUnavailable) else "Redis"
