"""A job as users see it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embedctl.broker import Broker
from embedctl.reaper import Reaper
from embedctl.store import JobState, JobStatus
from embedctl_config import wire
from embedctl_config.errors import JobCancelled, JobLost, JobUnfinished, WaitTimeout
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.settings import Settings, load_settings
from embedctl_config.wire import ChunkResult, ErrorCode

#: float32, records × dimensions.
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A record without a vector: its position in the input, its id if it has one, the reason and a sentence."""

    position: int
    id: str | None
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class TruncatedRecord:
    """A record of which only the first tokens were encoded: how many were used, and how many lost."""

    position: int
    id: str | None
    used: int
    lost: int


@dataclass(frozen=True, slots=True)
class ChunkVectors:
    """The results of one chunk: `vectors[i]` belongs to the record at `positions[i]`; a failed one's is NaN."""

    positions: npt.NDArray[np.int64]
    ids: list[str | None]
    vectors: Vectors
    errors: list[FailedRecord]
    truncations: list[TruncatedRecord]


class Job:
    """One submission. Every method raises JobNotFound when Redis no longer knows it, and BrokerUnavailable when
    Redis can't be reached."""

    def __init__(self, job_id: str, broker: Broker) -> None:
        self._id = job_id
        self._broker = broker

    @classmethod
    def get(cls, job_id: str, settings: Settings | None = None) -> Job:
        """The job of that id.

        Raises:
            JobNotFound: there is none; JobLost where Redis is younger than the job.
        """
        job = cls(job_id, Broker.connect(load_settings() if settings is None else settings))
        job.status()
        return job

    def __repr__(self) -> str:
        return f"Job({self._id!r})"

    @property
    def id(self) -> str:
        """Its id; it begins with the time of its creation, in UTC."""
        return self._id

    def status(self) -> JobStatus:
        """Its facts at this moment."""
        status = self._broker.jobs.status(self._id)
        return dataclasses.replace(status, live_workers=self._broker.workers.count(status.queue))

    def wait(self, timeout: float | None = None, progress: Callable[[JobStatus], None] | None = None) -> JobStatus:
        """Wait until the job has ended, and look after it meanwhile as workers do.

        Args:
            timeout: seconds; None waits for good.
            progress: called with the status whenever something happened, and every second.

        Raises:
            WaitTimeout: it did not end in time; it goes on.
            JobLost: Redis lost chunks of it, so that it can't end.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        reaper = Reaper(self._broker)
        seen = "0"
        while True:
            status = self.status()
            if progress is not None:
                progress(status)
            if status.state.ended:
                return status
            if status.lost_chunks is not None:
                raise self._lost_chunks(*status.lost_chunks)
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(
                    f"job {self._id} is {status.state} after {timeout:g} s: {status.done + status.failed} of "
                    f"{status.records} records are done, and it goes on"
                )
            seen = self._broker.jobs.wait_event(self._id, seen, timeout_s=min(1.0, left))
            reaper.round()

    def results(self) -> Iterator[ChunkVectors]:
        """The results of an ended job, chunk by chunk in input order; holds one chunk at a time.

        Raises:
            JobUnfinished: the job has not ended.
            JobCancelled: it was cancelled.
            JobLost: Redis lost a result.
        """
        yield from self._results(self._ended_status())

    def vectors(self) -> Vectors:
        """Every vector: float32, records × dimensions, in input order; NaN where a record failed.

        Raises:
            JobUnfinished, JobCancelled, JobLost: as for :meth:`results`.
        """
        status = self._ended_status()
        vectors = np.full((status.records, status.dim or 0), np.nan, np.float32)
        for chunk in self._results(status):
            vectors[chunk.positions] = chunk.vectors
        return vectors

    def errors(self) -> list[FailedRecord]:
        """The records without a vector, in input order.

        Raises:
            JobUnfinished, JobCancelled, JobLost: as for :meth:`results`.
        """
        return [error for chunk in self.results() for error in chunk.errors]

    def cancel(self) -> JobStatus:
        """End the job now. Workers stop at their next batch; what was stored is freed. An ended job stays as it is."""
        self._broker.jobs.cancel(self._id)
        return self.status()

    def discard(self) -> None:
        """Free the job and everything stored for it, now."""
        status = self._broker.jobs.status(self._id)
        self._broker.jobs.cancel(self._id)
        while not self._broker.upkeep.free(self._id, status.chunks):
            pass
        self._broker.upkeep.remove(self._id)

    def _ended_status(self) -> JobStatus:
        status = self.status()
        if status.state is JobState.CANCELLED:
            raise JobCancelled(f"job {self._id} was cancelled: it has no vectors")
        if not status.state.ended:
            raise JobUnfinished(
                f"job {self._id} is {status.state}: {status.done + status.failed} of {status.records} records are done"
            )
        return status

    def _results(self, status: JobStatus) -> Iterator[ChunkVectors]:
        fingerprint = job_fingerprint(status.model_fingerprint or "", status.options)
        for index in range(status.chunks):
            data = self._broker.jobs.result(self._id, index)
            if data is None:
                self._broker.jobs.status(self._id)  # expired or freed meanwhile: says so
                raise self._lost_chunks(index, index)
            result = wire.decode_result(data)
            if result.fingerprint != fingerprint:
                raise JobLost(
                    f"chunk {index} of job {self._id} has vectors of another model ({result.fingerprint[:12]}, not "
                    f"{fingerprint[:12]}): Redis was restored from parts of two states. Submit the corpus again."
                )
            yield _chunk_vectors(result)

    def _lost_chunks(self, first: int, last: int) -> JobLost:
        return JobLost(
            f"Redis lost chunks {first} to {last} of job {self._id}. Submit the same corpus with the same idempotency "
            "key to repair it, or as a new job."
        )


def _chunk_vectors(result: ChunkResult) -> ChunkVectors:
    positions = (
        np.arange(result.first, result.first + result.rows)
        if result.positions is None
        else np.asarray(result.positions, np.int64)
    )
    ids: list[str | None] = [None] * result.rows if result.ids is None else list(result.ids)
    vectors = np.frombuffer(result.vectors, "<f4").reshape(result.rows, result.dim)
    return ChunkVectors(
        positions=positions,
        ids=ids,
        vectors=vectors,
        errors=[
            FailedRecord(int(positions[each.row]), ids[each.row], each.code, each.message) for each in result.errors
        ],
        truncations=[
            TruncatedRecord(int(positions[each.row]), ids[each.row], each.used, each.lost)
            for each in result.truncations
        ],
    )
