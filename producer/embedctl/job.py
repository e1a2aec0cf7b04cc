"""A job as users see it."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn, Self, TypeVar

import numpy as np

from embedctl.broker import Broker
from embedctl.notices import Reminder
from embedctl.patience import check_timeout, patiently
from embedctl.reaper import Reaper
from embedctl.results import ChunkVectors, FailedRecord, Vectors, chunk_vectors, overlaid
from embedctl.routing import missing_worker
from embedctl.store import GoneWorker, JobState, JobStatus, Suspect, WorkerRow
from embedctl_config import keys, wire
from embedctl_config.errors import (
    CorpusChanged,
    JobCancelled,
    JobError,
    JobFailed,
    JobLost,
    JobStalled,
    JobUnfinished,
    WaitTimeout,
)
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.settings import Settings, load_settings
from embedctl_config.wire import ChunkResult

log = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE = 500

_Read = Callable[[str, int], ChunkResult | None]


class Job:
    """One submission. Every method raises JobNotFound when Redis no longer knows it, and BrokerUnavailable when
    Redis can't be reached; those that wait let it be away for two minutes.

    Those that wait raise JobLost or JobStalled where what they wait for can't come any more. While no live worker
    serves the job, the log says so at once and then every minute; `progress`, where it is given, is told instead. That
    Redis is away or full is logged likewise, and always.

    A `timeout` is looked at whenever Redis has answered: where it hangs and says nothing, a call ends at most a
    socket's time-out (10 s) later. One that is no number of seconds from 0 on is a SettingsError at once.

    The jobs of a process share a few connections, also among its threads; a child opens its own. A job can't be
    pickled: send its `id`, and get it there.

    Args:
        job_id: as `embedctl submit` printed it.
        broker: the Redis that holds it.
        sealed_with: how many chunks this process said that the job has; None where another process submitted it.
    """

    def __init__(self, job_id: str, broker: Broker, *, sealed_with: int | None = None) -> None:
        self._id = job_id
        self._broker = broker
        self._reaper = Reaper(broker)
        self._sealed_with = sealed_with
        self._stalled_since: float | None = None
        self._remind = Reminder(log.warning)
        self._remind_of_redis = Reminder(log.warning)

    @classmethod
    def get(cls, job_id: str, settings: Settings | None = None) -> Job:
        """The job of that id.

        Raises:
            JobNotFound: there is none; JobLost where Redis is younger than the job.
        """
        job = cls(job_id, Broker.shared(load_settings() if settings is None else settings))
        job.status()
        return job

    def __repr__(self) -> str:
        return f"Job({self._id!r})"

    def __reduce__(self) -> NoReturn:
        # Its settings may hold a password, and nobody expects one in a message or in a file of results.
        raise TypeError(f"a Job can't be pickled: send its id, and get it there by Job.get({self._id!r})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections of this process that are idle. Not needed: they are few, and all jobs share them.

        The job goes on, and it and all others can still be asked: that opens a connection again.
        """
        self._broker.close()

    @property
    def id(self) -> str:
        """Its id; it begins with the time of its creation, in UTC."""
        return self._id

    def status(self) -> JobStatus:
        """Its facts at this moment."""
        status = self._broker.jobs.status(self._id)
        return dataclasses.replace(status, live_workers=self._broker.workers.count(status.queue))

    def workers(self) -> list[WorkerRow]:
        """The live workers that serve its class and model, as they last described themselves."""
        return list(self._broker.workers.alive(self._broker.jobs.status(self._id).queue))

    def gone_workers(self) -> list[GoneWorker]:
        """The workers of its class and model that went without a good-bye in the last minutes."""
        queue = self._broker.jobs.status(self._id).queue
        return [each for each in self._broker.workers.gone() if queue in each.worker.queues]

    def suspects(self) -> list[Suspect]:
        """The chunks an owner of which died and which have not ended since, each with its history."""
        return self._broker.jobs.suspects(self._id)

    def wait(self, timeout: float | None = None, progress: Callable[[JobStatus], None] | None = None) -> JobStatus:
        """Wait until the job has ended, and look after it meanwhile as workers do.

        Args:
            timeout: seconds; None waits for good.
            progress: called with the status whenever something happened, and every second.

        Raises:
            WaitTimeout: it did not end in time; it goes on.
            JobLost: Redis lost chunks of it, so that it can't end.
            JobStalled: its producer died before it had submitted all of it, and all that is there is done.
        """
        check_timeout(timeout)
        return self._wait(timeout, time.monotonic(), progress)

    def _wait(self, timeout: float | None, began: float, progress: Callable[[JobStatus], None] | None) -> JobStatus:
        """See :meth:`wait`, which began at that time of the monotonic clock."""
        deadline = None if timeout is None else began + timeout
        seen = "0"
        while True:
            status = self._patiently(self.status, deadline)
            self._tell(status, progress)
            if status.state.ended:
                return status
            self._check_prospects(status, deadline)
            left = self._left(status, timeout, deadline)
            seen = self._next_event(seen, min(1.0, left), deadline)
            self._patiently(partial(self._reaper.round, deadline), deadline)

    def wait_until_sealed(
        self, progress: Callable[[JobStatus], None] | None = None, timeout: float | None = None
    ) -> JobStatus:
        """Wait until the job has all its records; they may not be encoded yet.

        Args:
            progress: as for :meth:`wait`.
            timeout: seconds; None waits for good.

        Raises:
            WaitTimeout: that took longer.
            JobCancelled: it was cancelled.
            JobStalled, JobLost: as for :meth:`wait`.
        """
        check_timeout(timeout)
        return self._wait_until_sealed(timeout, time.monotonic(), progress)

    def _wait_until_sealed(
        self, timeout: float | None, began: float, progress: Callable[[JobStatus], None] | None
    ) -> JobStatus:
        """See :meth:`wait_until_sealed`, which began at that time of the monotonic clock."""
        deadline = None if timeout is None else began + timeout
        seen = "0"
        while True:
            status = self._told(progress, deadline)
            if status.original_chunks is not None or status.state.ended:
                return status
            self._check_prospects(status, deadline)
            left = self._left(status, timeout, deadline)
            seen = self._next_event(seen, min(1.0, left), deadline)

    def iter_results(
        self,
        *,
        start: int = 0,
        timeout: float | None = None,
        progress: Callable[[JobStatus], None] | None = None,
    ) -> Iterator[ChunkVectors]:
        """The results in input order, chunk by chunk, each as soon as it is there; holds one chunk at a time.

        Records that were retried come in their original places.

        Args:
            start: how many chunks to leave out.
            timeout: most seconds to wait for one chunk; None waits for good.
            progress: as for :meth:`wait`; called while a chunk is waited for.

        Raises:
            WaitTimeout: a chunk did not come in time; `start` goes on with it.
            JobCancelled: the job was cancelled.
            JobFailed: its error budget ended it before it was done.
            JobLost: Redis lost a result.
            JobStalled: as for :meth:`wait`.
        """
        check_timeout(timeout)
        return self._iter_results(start, timeout, None, progress)

    def _iter_results(
        self, start: int, timeout: float | None, began: float | None, progress: Callable[[JobStatus], None] | None
    ) -> Iterator[ChunkVectors]:
        """See :meth:`iter_results`; the first chunk is waited for since then (monotonic clock), or from now."""
        began = time.monotonic() if began is None else began
        status = self._told(progress, None if timeout is None else began + timeout)
        index = start
        while status.original_chunks is None or index < status.original_chunks:
            wait = partial(self._wait_for_chunk, progress=progress, timeout=timeout, began=began)
            deadline = None if timeout is None else began + timeout
            chunk = self._patiently(partial(self._chunk, index, status, wait), deadline)
            if chunk is None:
                status = wait(index)
            else:
                yield chunk
                index += 1
                began = time.monotonic()

    def vectors(self) -> Vectors:
        """Every vector: float32, records × dimensions, in input order; NaN where a record failed.

        Raises:
            JobUnfinished: the job has not ended.
            JobCancelled, JobFailed, JobLost: as for :meth:`iter_results`.
        """
        vectors = self._unfilled()
        for _ in self._fill(vectors):
            pass
        return vectors

    def iter_errors(self) -> Iterator[FailedRecord]:
        """The records of an ended job that have no vector, in input order; holds one chunk at a time.

        Of a job that its error budget ended, those that failed until then.

        Raises:
            JobUnfinished: the job has not ended.
            JobCancelled, JobLost: as for :meth:`iter_results`.
        """
        for errors in self._errors_by_chunk():
            yield from errors

    def errors(self) -> list[FailedRecord]:
        """The records without a vector, in input order; see :meth:`iter_errors`."""
        return list(self.iter_errors())

    def retry_failed(self, timeout: float | None = None) -> int:
        """Queue the records that failed once more; how many they are. Holds no text, whatever the job's size.

        Args:
            timeout: most seconds to wait for a Redis that is away or full; two minutes, and for good, where None. What
                was queued until then goes on, and another call queues the rest.

        Raises:
            JobUnfinished: the job has not ended.
            JobCancelled: it was cancelled.
            JobError: its error budget ended it, or another process retries it.
            WaitTimeout: Redis was away or full until the time was over.
        """
        check_timeout(timeout)
        jobs = self._broker.jobs
        ask = partial(self._patiently, deadline=None if timeout is None else time.monotonic() + timeout)
        status = ask(self.status)
        if status.state is JobState.CANCELLED:
            raise JobCancelled(f"job {self._id} was cancelled: submit its corpus again")
        token = secrets.token_hex(8)
        chunks, retried = status.chunks, 0
        for start in range(0, status.chunks, _SLICE):
            if retried:  # where nothing fails for long, the right to add must not lapse
                ask(partial(jobs.hold, self._id, token))
            count = min(_SLICE, status.chunks - start)
            for chunk in ask(partial(jobs.failed_chunks, self._id, start, count)):
                records = ask(partial(jobs.retry, self._id, chunk, chunks, token))
                if records:
                    retried += records
                    chunks += 1
                    ask(partial(self._broker.send_issued, status))
        if retried or (status.original_chunks is not None and not status.sealed):
            self._seal_retry(ask, chunks, retried)
            ask(partial(self._broker.send_issued, status))
        return retried

    def _seal_retry(self, ask: Callable[[Callable[[], None]], None], chunks: int, retried: int) -> None:
        try:
            ask(partial(self._broker.jobs.seal, self._id, chunks))
        except CorpusChanged as error:
            if not retried:
                raise JobError(f"job {self._id} was being retried by another process") from error
            raise JobLost(
                f"Redis lost that failed records of job {self._id} were queued again: retry them once more"
            ) from error

    def cancel(self) -> JobStatus:
        """End the job now. Workers stop at their next batch; what was stored is freed. An ended job stays as it is."""
        if self._broker.jobs.cancel(self._id) is JobState.CANCELLED:
            self._broker.upkeep.free(self._id, self._broker.jobs.status(self._id).chunks)
        return self.status()

    def discard(self) -> None:
        """Free the job and everything stored for it, now."""
        self._broker.jobs.cancel(self._id)  # first, so that no producer adds to it any more
        self._broker.upkeep.free(self._id, self._broker.jobs.status(self._id).chunks)
        self._broker.upkeep.remove(self._id)

    def _unfilled(self) -> Vectors:
        """An ended job's vectors, all of them NaN yet."""
        status = self._ended_status()
        return np.full((status.records, status.dim or 0), np.nan, np.float32)

    def _fill(self, vectors: Vectors, start: int = 0) -> Iterator[None]:
        """Put the vectors of one chunk after the other into their rows."""
        for chunk in self.iter_results(start=start):
            vectors[chunk.positions] = chunk.vectors
            yield

    def _errors_by_chunk(self, start: int = 0) -> Iterator[list[FailedRecord]]:
        """The failed records of one chunk after the other; see :meth:`iter_errors`."""
        status = self._ended_status()
        chunks = status.original_chunks or status.chunks
        for at in range(start, chunks, _SLICE):
            indices = range(at, min(at + _SLICE, chunks))
            doubtful = (
                set(indices)
                if status.stopped_by is not None
                else self._broker.jobs.chunks_with_errors(self._id, at, len(indices))
            )
            for index in indices:
                yield self._errors_of(index, status) if index in doubtful else []

    def _errors_of(self, index: int, status: JobStatus) -> list[FailedRecord]:
        """The failed records of one chunk of an ended job; none where its error budget kept it from being encoded."""
        head = self._broker.jobs.result_head
        wait = partial(self._wait_for_chunk, progress=None)
        while (chunk := self._chunk(index, status, wait, head)) is None and status.stopped_by is None:
            wait(index)
        return [] if chunk is None else chunk.errors

    def _ended_status(self) -> JobStatus:
        status = self.status()
        if status.state is JobState.CANCELLED:
            raise JobCancelled(f"job {self._id} was cancelled: it has no vectors")
        if not status.state.ended:
            raise JobUnfinished(
                f"job {self._id} is {status.state}: {status.done + status.failed} of {status.records} records are done"
            )
        return status

    def _tell(self, status: JobStatus, progress: Callable[[JobStatus], None] | None) -> None:
        """Tell `progress` of the job; where there is none, the log what the job waits for."""
        if progress is not None:
            progress(status)
        else:
            self._remind(missing_worker(status))

    def _check_prospects(self, status: JobStatus, deadline: float | None) -> None:
        """See that a job which has not ended can still do so, and say again that it is sealed where Redis lost that.

        Raises:
            JobLost: Redis lost chunks of it.
            JobStalled: nobody submits the rest of it.
        """
        if status.lost_chunks is not None:
            raise self._lost_chunks(*status.lost_chunks)
        if status.original_chunks is not None or status.state is not JobState.SUBMITTING:
            self._stalled_since = None
        elif self._sealed_with == status.chunks:
            self._patiently(partial(self._broker.jobs.seal, self._id, status.chunks), deadline)
            log.warning("job %s: Redis had lost that all its records are there, and was told again", self._id)
        elif not status.stalled or status.done + status.failed < status.records:
            self._stalled_since = None
        else:
            now = time.monotonic()
            self._stalled_since = self._stalled_since or now
            if now - self._stalled_since > keys.PRODUCER_LEASE_S:  # another producer may be on its way
                if self._patiently(self._broker.connection.is_full, deadline):
                    self._stalled_since = None  # one that waits for room may not even be able to say that it lives
                    return
                raise JobStalled(
                    f"job {self._id} has not all its records: its producer died, or Redis lost its last words. The "
                    f"{status.records} that are there are done. Submit the same corpus with --resume {self._id} or "
                    "with its idempotency key, or cancel the job"
                )

    def _left(self, status: JobStatus, timeout: float | None, deadline: float | None) -> float:
        """Seconds until the deadline; a second where there is none.

        Raises:
            WaitTimeout: it is over.
        """
        left = 1.0 if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise WaitTimeout(
                f"job {self._id} is {status.state} after {timeout:g} s: {status.done + status.failed} of "
                f"{status.records} records are done, and it goes on"
            )
        return left

    def _told(self, progress: Callable[[JobStatus], None] | None, deadline: float | None = None) -> JobStatus:
        """The status, told to `progress`.

        Raises:
            JobCancelled: the job was cancelled.
        """
        status = self._patiently(self.status, deadline)
        self._tell(status, progress)
        if status.state is JobState.CANCELLED:
            raise JobCancelled(f"job {self._id} was cancelled: it has no vectors")
        return status

    def _patiently(self, ask: Callable[[], T], deadline: float | None = None) -> T:
        """Ask Redis until it answers; while it is away, nobody's silence means anything."""
        return patiently(ask, pausing=self._pausing, deadline=deadline)

    def _pausing(self) -> None:
        self._reaper.rest()
        self._remind_of_redis(f"job {self._id}: waits for Redis, which is away or full")

    def _next_event(self, seen: str, timeout_s: float, deadline: float | None = None) -> str:
        return self._patiently(partial(self._broker.jobs.wait_event, self._id, seen, timeout_s), deadline)

    def _wait_for_chunk(
        self,
        index: int,
        progress: Callable[[JobStatus], None] | None,
        timeout: float | None = None,
        began: float = 0.0,
    ) -> JobStatus:
        """Wait until a chunk's result is there, or until it is known that it never will be."""
        deadline = None if timeout is None else began + timeout
        seen = "0"
        while True:
            status = self._told(progress, deadline)
            if status.original_chunks is not None and index >= status.chunks:
                return status
            if self._patiently(partial(self._broker.jobs.has_result, self._id, index), deadline):
                return status
            if status.stopped_by is not None:
                raise JobFailed(
                    f"job {self._id} was ended by its error budget after {status.failed} failed records; "
                    f"`embedctl errors {self._id}` lists them"
                )
            if status.state.ended:
                raise self._lost_chunks(*(status.lost_chunks or (index, index)))
            self._check_prospects(status, deadline)
            left = self._left(status, timeout, deadline)
            seen = self._next_event(seen, min(1.0, left), deadline)
            self._patiently(partial(self._reaper.round, deadline), deadline)

    def _chunk(
        self, index: int, status: JobStatus, wait: Callable[[int], JobStatus], read: _Read | None = None
    ) -> ChunkVectors | None:
        """A chunk's results, with those of its records that were retried in their places; None if not there yet.

        Args:
            wait: waits for a chunk of records that were retried.
            read: reads one chunk of a job; all of it where None.
        """
        read = read or self._whole
        result = read(self._id, index)
        if result is None:
            return None
        fingerprint = job_fingerprint(status.model_fingerprint or self._pinned_fingerprint(), status.options)
        if result.fingerprint != fingerprint:
            raise JobLost(
                f"chunk {index} of job {self._id} has vectors of another model ({result.fingerprint[:12]}, not "
                f"{fingerprint[:12]}): Redis was restored from parts of two states. Submit the corpus again."
            )
        chunk = chunk_vectors(result)
        retried = self._broker.jobs.retried_as(self._id, index) if chunk.errors else None
        if retried is None:
            return chunk
        later = self._chunk(retried, status, wait, read)
        if later is None:
            wait(retried)
            later = self._chunk(retried, status, wait, read)
        return chunk if later is None else overlaid(chunk, later)

    def _whole(self, job_id: str, index: int) -> ChunkResult | None:
        data = self._broker.jobs.result(job_id, index)
        return None if data is None else wire.decode_result(data)

    def _pinned_fingerprint(self) -> str:
        """The model's fingerprint of a job whose status was read before its first claim."""
        return self._broker.jobs.status(self._id).model_fingerprint or ""

    def _lost_chunks(self, first: int, last: int) -> JobLost:
        return JobLost(
            f"Redis lost chunks {first} to {last} of job {self._id}. Submit the same corpus with --resume {self._id} "
            "to repair it, or with its idempotency key."
        )
