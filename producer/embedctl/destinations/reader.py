"""Reading the results of one job, chunk by chunk, in input order."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from embedctl.destinations.registry import is_database
from embedctl.destinations.released import Released, refuse_database
from embedctl.queueing.retrying import TimeLimit
from embedctl.queueing.routing import missing_worker
from embedctl.store import JobState, JobStatus
from embedctl.waiting.results import ChunkVectors, FailedRecord, Vectors, chunk_vectors, no_records, overlaid
from embedctl.waiting.waiter import Progress, Waiter, ended_by_budget, lost_chunks, refuse_cancelled
from embedctl_config import wire
from embedctl_config.errors import JobFailed, JobLost, JobUnfinished, SettingsError
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.outputs import Output, asked_by
from embedctl_config.wire import ChunkResult

if TYPE_CHECKING:
    from embedctl.destinations.part_reader import DrainedChunks

#: Chunks whose heads are asked for together.
_SLICE = 500

_Read = Callable[[str, int], ChunkResult | None]
_Wait = Callable[[int], JobStatus]


class ResultReader:
    """Reads what became of a job's records. It holds one chunk at a time, and waits for a chunk that is not there."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._job_id = waiter.job_id
        self._broker = waiter.broker
        self._drained: DrainedChunks | None = None
        self._released: Released | None = None

    def ended_status(self) -> JobStatus:
        """The status of a job that has ended; raises JobUnfinished if it has not, and JobCancelled if it was
        cancelled."""
        status = self._waiter.ended_lately() or self._waiter.status(recent=True)
        refuse_cancelled(status)
        if not status.state.ended:
            raise JobUnfinished(
                f"job {self._job_id} is {status.state}: {status.done + status.failed} of {status.records} records are "
                f"done. {missing_worker(status) or 'Ask again when it has ended'}"
            )
        return status

    def chunks(
        self,
        start: int = 0,
        timeout: float | None = None,
        progress: Progress | None = None,
        since: float | None = None,
        ended: JobStatus | None = None,
    ) -> Iterator[ChunkVectors]:
        """The results of one chunk after the other; see :meth:`Job.iter_results`. In a job that was ended before its
        last record, a chunk that was not encoded comes without records.

        `since` is when the wait for the first chunk began, by the monotonic clock; None: when it is asked for. With the
        status of a job that has `ended`, it raises JobUnfinished where it would wait for records that are retried.
        """
        limit = TimeLimit(timeout, time.monotonic() if since is None else since)
        status = ended or self._waiter.ended_lately()
        if status is None:
            status = self._waiter.look(progress, limit.deadline)
        elif progress is not None:
            progress(status)
        refuse_cancelled(status)
        index, cut_short = start, False
        while (chunks := _chunks_to_read(status)) is None or index < chunks:
            wait = partial(self._wait_for_chunk, limit=limit, progress=progress)
            retried = wait if ended is None else self._refuse_to_wait
            chunk = self._waiter.ask(partial(self._chunk, index, status, retried), limit.deadline)
            if chunk is None and status.stopped_by is not None:
                chunk, cut_short = no_records(status.dim or 0), True
            if chunk is None:
                status = wait(index)
            else:
                yield chunk
                index += 1
                limit = TimeLimit(timeout, time.monotonic())
                if progress is not None and not status.state.ended:
                    status = self._waiter.look_again(status, progress, limit.deadline)
        if cut_short and status.state is JobState.FAILED:
            raise JobFailed(ended_by_budget(status))

    def at_end(self, limit: TimeLimit, progress: Progress | None) -> list[ChunkVectors]:
        """All results of a job, once it has ended; see :meth:`Job.results`."""
        waiter = self._waiter
        waiter.reads_result = waiter.sealed_with == 1
        try:
            waiter.until_ended(limit, progress, only_end=True)
            return list(self.chunks())
        finally:
            waiter.reads_result, waiter.first_result, waiter.told = False, None, None

    def ready(self, start: int) -> Iterator[ChunkVectors]:
        """Those results that are there already, from a chunk on up to the first that is not there. Does not wait.
        Raises JobCancelled or JobLost as for :meth:`Job.iter_results`."""
        status = self._waiter.status()
        refuse_cancelled(status)
        with suppress(_NotThere):
            for index in itertools.count(start):
                if (chunks := _chunks_to_read(status)) is not None and index >= chunks:
                    return
                chunk = self._chunk(index, status, _give_up)
                if chunk is None:
                    return
                yield chunk

    def empty_vectors(self) -> tuple[JobStatus, Vectors]:
        """The status of an ended job, and an array for its vectors: float32, records × dimensions, filled with NaN.
        Raises as :meth:`ended_status`."""
        status = self.ended_status()
        if Output.DENSE not in asked_by(status.options):
            raise SettingsError(f"job {status.id} has no dense vectors: read them with sparse() or multi()")
        return status, np.full((status.records, status.dim or 0), np.nan, np.float32)

    def fill(self, status: JobStatus, vectors: Vectors, start: int = 0) -> Iterator[None]:
        """Put the vectors of one chunk after the other into their rows. Raises JobFailed if no record has a vector, and
        JobUnfinished if somebody has retried its records since its end."""
        for chunk in self.chunks(start, ended=status):
            if status.failed == status.records and chunk.errors:
                raise _all_failed(status, chunk.errors[0])
            vectors[chunk.positions] = chunk.vectors
            yield

    def errors_by_chunk(self, start: int = 0, most: int | None = None) -> Iterator[list[FailedRecord]]:
        """The failed records of one chunk after the other; with `most`, of that many first chunks alone. See
        :meth:`Job.iter_errors`."""
        status = self.ended_status()
        chunks = status.original_chunks or status.chunks
        if most is not None:
            chunks = min(chunks, most)
        for at in range(start, chunks, _SLICE):
            indices = range(at, min(at + _SLICE, chunks))
            doubtful = (
                set(indices)
                if status.stopped_by is not None
                else self._broker.jobs.chunks_with_errors(self._job_id, at, len(indices))
            )
            for index in indices:
                chunk = self._head(index, status) if index in doubtful else None
                yield [] if chunk is None else chunk.errors

    def heads(self, progress: Progress | None = None) -> Iterator[ChunkVectors]:
        """The chunks of a job without their vectors and kept fields, once the job has ended, in input order. A chunk
        that was not encoded is left out. Raises JobCancelled, JobLost or JobStalled as for :meth:`Job.iter_results`."""
        status = self._waiter.until_ended(TimeLimit.from_now(None), progress)
        refuse_cancelled(status)
        for index in range(status.original_chunks or status.chunks):
            if (chunk := self._head(index, status)) is not None:
                yield chunk

    def _head(self, index: int, status: JobStatus) -> ChunkVectors | None:
        """A chunk of an ended job without its vectors; None if the job was ended before it was encoded."""
        head = self._broker.jobs.result_head
        wait = partial(self._wait_for_chunk, limit=TimeLimit.from_now(None))
        while (chunk := self._chunk(index, status, wait, head)) is None and status.stopped_by is None:
            wait(index)
        return chunk

    def _wait_for_chunk(self, index: int, limit: TimeLimit, progress: Progress | None = None) -> JobStatus:
        """Wait until a chunk's result is there, or the job turns out to have no such chunk, or was ended without it;
        raises JobCancelled or JobLost if the result will never come."""

        def is_there(status: JobStatus) -> bool:
            refuse_cancelled(status)
            if status.original_chunks is not None and index >= status.chunks:
                return True
            if self._waiter.ask(partial(self._broker.jobs.has_result, self._job_id, index), limit.deadline):
                return True
            if status.drained_to is not None and self._is_drained(index):
                return True
            if status.stopped_by is not None:
                return True  # what is there, is there
            if status.state.ended:
                raise lost_chunks(self._job_id, *(status.lost_chunks or (index, index)))
            return False

        return self._waiter.until(is_there, limit, progress)

    def _refuse_to_wait(self, _: int) -> JobStatus:
        """The job's status, if it has ended again. What was known of its end may be a second old."""
        self._waiter.forget()
        return self.ended_status()

    def _chunk(self, index: int, status: JobStatus, wait: _Wait, read: _Read | None = None) -> ChunkVectors | None:
        """A chunk's results; None if they are not there yet. Its retried records stand in their places, and `wait`
        waits for them. `read` reads one chunk of a job; all of it if None."""
        read = read or self._whole
        result = read(self._job_id, index)
        if result is not None:
            check_fingerprint(self._waiter, status, index, result)
            chunk = chunk_vectors(result)
        elif status.drained_to is None or not self._is_drained(index):
            return None
        elif (found := self._drained_chunk(index, status.drained_to, whole=read == self._whole)) is not None:
            chunk = found
        else:  # it retried records, and is laid over their chunk
            retried = self._broker.jobs.retried_as(self._job_id, index)
            return None if retried is None else self._chunk(retried, status, wait, read)
        retried = self._broker.jobs.retried_as(self._job_id, index) if chunk.errors else None
        if retried is None:
            return chunk
        later = self._chunk(retried, status, wait, read)
        if later is None:
            wait(retried)
            later = self._chunk(retried, status, wait, read)
        return chunk if later is None else overlaid(chunk, later)

    def _whole(self, job_id: str, index: int) -> ChunkResult | None:
        read_before = None if index else self._waiter.first_result
        data = read_before or self._broker.jobs.result(job_id, index)
        return None if data is None else wire.decode_result(data)

    def _is_drained(self, index: int) -> bool:
        return self._waiter.ask(partial(self._broker.drains.is_drained, self._job_id, index))

    def _drained_chunk(self, index: int, place: str, *, whole: bool) -> ChunkVectors | None:
        """A chunk that left Redis, `whole` or without its vectors; None if its records are laid over those of another
        chunk. JobDrained: it can't be read here, because it is in a database, or the job's parts are elsewhere."""
        if is_database(place):
            drains = self._broker.drains
            state = drains.state(self._job_id)
            if whole:
                refuse_database(drains, self._job_id, state)
            self._released = self._released or Released(drains.batches(self._job_id, state))
            return self._released.chunk(index)
        if self._drained is None:
            # pyarrow is imported when this is first used.
            from embedctl.destinations.part_reader import DrainedChunks

            self._drained = DrainedChunks(self._broker.drains, self._job_id, place)
        found = self._drained.chunk(index)
        if whole or found is None:
            return found
        return dataclasses.replace(found, vectors=found.vectors[:, :0], sparse=None, multi=None)


class _NotThere(Exception):
    """Raised when a chunk of retried records is not there yet."""


def _give_up(_: int) -> NoReturn:
    raise _NotThere


def check_fingerprint(waiter: Waiter, status: JobStatus, index: int, result: ChunkResult) -> None:
    """See that a chunk's vectors are of the job's model; raises JobLost if they are not. The status may be older than
    the job's first claim, which pins its model."""
    pinned = status.model_fingerprint or waiter.broker.jobs.status(status.id).model_fingerprint or ""
    fingerprint = job_fingerprint(pinned, status.options)
    if result.fingerprint != fingerprint:
        raise JobLost(
            f"chunk {index} of job {status.id} has vectors of another model ({result.fingerprint[:12]}, not "
            f"{fingerprint[:12]}): Redis was restored from parts of two states. Submit the corpus again."
        )


def _chunks_to_read(status: JobStatus) -> int | None:
    """How many chunks hold a job's records; None while its producer may add more."""
    if status.stopped_by is not None:
        return status.original_chunks or status.chunks
    return status.original_chunks


def _all_failed(status: JobStatus, first: FailedRecord) -> JobFailed:
    return JobFailed(
        f"every record of job {status.id} failed, so there are no vectors. Record {first.position}: {first.message} "
        f"({first.code}). `embedctl errors {status.id}` lists them"
    )
