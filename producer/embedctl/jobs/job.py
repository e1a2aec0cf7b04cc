"""A job as users see it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from embedctl.destinations.reader import ResultReader
from embedctl.queueing.broker import Broker
from embedctl.queueing.retrying import TimeLimit, check_timeout
from embedctl.store import GoneWorker, JobState, JobStatus, Suspect, WorkerRow
from embedctl.waiting.results import (
    ChunkVectors,
    FailedRecord,
    MultiRecord,
    SparseRecord,
    Vectors,
    multi_records,
    sparse_records,
)
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import (
    BrokerRefused,
    CorpusChanged,
    JobCancelled,
    JobDamaged,
    JobError,
    JobLost,
    SettingsError,
)
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings

if TYPE_CHECKING:
    from embedctl.destinations.loop import Delivered, RefusedRecord
    from embedctl.destinations.numbers import Numbers

#: Chunks whose counts are asked for together.
_CHUNKS_TOGETHER = 500


def retry_failed(waiter: Waiter, limit: TimeLimit) -> int:
    """Move the failed records of an ended job into new chunks, and queue these; see :meth:`Job.retry_failed`."""
    ask = partial(waiter.ask, deadline=limit.deadline)
    job_id, broker = waiter.job_id, waiter.broker
    status = ask(waiter.status)
    if status.state is JobState.CANCELLED:
        raise JobCancelled(f"job {job_id} was cancelled: submit its corpus again")
    if status.stopped_by is not None:
        raise broker.jobs.why_stopped(job_id)
    token = secrets.token_hex(8)
    chunks, retried = status.chunks, 0
    for start in range(0, status.chunks, _CHUNKS_TOGETHER):
        if retried:  # a long stretch without failures must not cost this process its right to add
            ask(partial(broker.jobs.hold, job_id, token))
        count = min(_CHUNKS_TOGETHER, status.chunks - start)
        for chunk in ask(partial(broker.jobs.failed_chunks, job_id, start, count)):
            records = ask(partial(broker.jobs.retry, job_id, chunk, chunks, token))
            if records:
                retried += records
                chunks += 1
    if retried or (status.original_chunks is not None and not status.sealed):
        _seal(waiter, limit, chunks, retried)
    return retried


def _seal(waiter: Waiter, limit: TimeLimit, chunks: int, retried: int) -> None:
    try:
        waiter.ask(partial(waiter.broker.jobs.seal, waiter.job_id, chunks), limit.deadline)
    except CorpusChanged as error:
        if not retried:
            raise JobError(f"job {waiter.job_id} was being retried by another process") from error
        if waiter.ask(waiter.status, limit.deadline).chunks >= chunks:
            return  # this process stood still, so its retry was closed for it, and another one retried more since then
        raise JobLost(f"Redis lost the retry of job {waiter.job_id}: retry its failed records once more") from error


class Job:
    """One submission. Every method raises JobNotFound if Redis does not know the job, and BrokerUnavailable if Redis
    can't be reached. Methods that wait let Redis be away for two minutes, and full without limit.

    Methods that wait raise JobLost or JobStalled if what they wait for can no longer come. While no live worker serves
    the job, a warning is logged at once and then every minute; if `progress` is given, it is called instead. A warning
    is also logged, in any case, while Redis is away or full.

    A `timeout` is checked each time Redis has answered. If Redis does not answer, a call ends at most one socket
    timeout (10 s) late. A timeout that is not a number of seconds, 0 or more, is a SettingsError at once.

    The jobs of a process share a few connections, also among its threads; a forked child opens its own. A job can't be
    pickled: send its `id`, and call :meth:`get` there.

    Args:
        job_id: in full, as `embedctl submit` printed it.
        broker: the Redis that holds it.
        sealed_with: the number of chunks with which this process sealed the job; None if another process did.
        seen: the id of the job's last event that this process knows; None if it knows none.
    """

    def __init__(self, job_id: str, broker: Broker, *, sealed_with: int | None = None, seen: str | None = None) -> None:
        self._id = job_id
        self._broker = broker
        self._waiter = Waiter(job_id, broker, sealed_with=sealed_with, seen=seen)
        self._reader = ResultReader(self._waiter)

    @classmethod
    def get(cls, job_id: str, settings: Settings | None = None) -> Job:
        """The job of that id.

        Args:
            job_id: the job's id, or its beginning or ending, of at least 4 characters, if no other job's id has it.
            settings: read from the environment and the configuration files if None.

        Raises:
            JobNotFound: there is none; JobLost if Redis is younger than the job.
            JobAmbiguous: the ids of several jobs begin or end so.
        """
        broker = Broker.shared(load_settings() if settings is None else settings)
        job = cls(broker.jobs.resolve(job_id), broker)
        job.status()
        return job

    def __repr__(self) -> str:
        return f"Job({self._id!r})"

    def __reduce__(self) -> NoReturn:
        # Its settings may hold a password, which must not get into a message or a file unnoticed.
        raise TypeError(f"a Job can't be pickled: send its id, and get it there by Job.get({self._id!r})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the idle connections of this process. Not needed: they are few, and all jobs share them.

        The job goes on. It and all others can still be asked, which opens a connection again.
        """
        self._broker.close()

    @property
    def id(self) -> str:
        """The job's id; it begins with the time of the job's creation, in UTC."""
        return self._id

    def status(self) -> JobStatus:
        """The job's facts at this moment."""
        return self._waiter.status()

    def workers(self) -> list[WorkerRow]:
        """The live workers that serve the job's class and model, as they last described themselves."""
        return list(self._broker.workers.alive(self._broker.jobs.status(self._id).queue))

    def gone_workers(self) -> list[GoneWorker]:
        """The workers of the job's class and model that ended in the last minutes without a farewell."""
        queue = self._broker.jobs.status(self._id).queue
        return [each for each in self._broker.workers.gone() if queue in each.worker.queues]

    def suspects(self) -> list[Suspect]:
        """The chunks that have not ended since one of their owners died, each with its history."""
        return self._broker.jobs.suspects(self._id)

    def wait(self, timeout: float | None = None, progress: Callable[[JobStatus], None] | None = None) -> JobStatus:
        """Wait until the job has ended, and run the reaper meanwhile, as workers do.

        Args:
            timeout: seconds; None for no limit.
            progress: called with the status whenever something happened, and every second.

        Raises:
            WaitTimeout: the job did not end in time; it goes on.
            JobLost: Redis lost chunks of the job, so it can't end.
            JobStalled: the job's producer died before it had submitted all records, and the others are done.
        """
        return self._waiter.until_ended(TimeLimit.from_now(timeout), progress)

    def wait_until_sealed(
        self, progress: Callable[[JobStatus], None] | None = None, timeout: float | None = None
    ) -> JobStatus:
        """Wait until the job has all its records; they may not be encoded yet.

        Args:
            progress: as for :meth:`wait`.
            timeout: seconds; None for no limit.

        Raises:
            WaitTimeout: that took longer.
            JobCancelled: the job was cancelled.
            JobStalled, JobLost: as for :meth:`wait`.
        """
        return self._waiter.until_sealed(TimeLimit.from_now(timeout), progress)

    def iter_results(
        self,
        *,
        start: int = 0,
        timeout: float | None = None,
        progress: Callable[[JobStatus], None] | None = None,
    ) -> Iterator[ChunkVectors]:
        """The results in input order, chunk by chunk, each as soon as it is there; holds one chunk at a time.

        Records that were retried come in their original places. Of a job that was stopped, a chunk that was not
        encoded comes without records.

        Args:
            start: chunks to leave out.
            timeout: longest wait for one chunk (seconds); None for no limit.
            progress: as for :meth:`wait`; called while a chunk is waited for.

        Raises:
            WaitTimeout: a chunk did not come in time; another call with `start` resumes with it.
            JobCancelled: the job was cancelled.
            JobFailed: the job's error budget ended it before it was done; raised after the last result that there is.
            JobLost: Redis lost a result.
            JobStalled: as for :meth:`wait`.
        """
        check_timeout(timeout)
        return self._reader.chunks(start, timeout, progress)

    def results(self, timeout: float | None = None) -> list[ChunkVectors]:
        """Wait until the job has ended; its results in input order, chunk by chunk, all in memory.

        For a small job that somebody waits for: this asks Redis less than :meth:`wait` and then :meth:`iter_results`.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            WaitTimeout: the job did not end in time; it goes on.
            JobCancelled: the job was cancelled.
            JobFailed: the job's error budget ended it before it was done.
            JobLost, JobStalled: as for :meth:`wait`.
        """
        return self._reader.at_end(TimeLimit.from_now(timeout), None)

    def deliver(
        self,
        to: str | os.PathLike[str],
        progress: Callable[[JobStatus], None] | None = None,
        written: Callable[[ChunkVectors], None] | None = None,
        *,
        refused: Callable[[RefusedRecord], None] | None = None,
        duplicates: str = "error",
        dtype: str | None = None,
        ranges: Vectors | None = None,
    ) -> Delivered:
        """Write the records where they are to rest as they arrive, until the job has ended.

        If this call dies, another one resumes.

        - **A file**, whose name ends in `.npy`, `.npz`, `.jsonl` or `.parquet`, has one row for each record. The
          results stay in Redis.
        - **A folder**, which is made if it does not exist, or `s3://BUCKET/PREFIX/`: the results move to parts, parquet
          files of about 100,000 records; `manifest.json` comes last. It may hold parts of this job, and of no other.
          Results leave Redis when their part is durable, and while they take more than a quarter of Redis' maxmemory,
          the job pauses. The methods that read results then read the parts, if this machine has them.
        - **The table of a database**, such as `postgresql://host/database?table=docs`: each record goes under its id,
          and replaces the one there. `embedctl destinations` lists the forms of URLs, which must not hold a password.
          Failed records are left out; :meth:`errors` has them. A second call changes nothing, and writes what the table
          has lost since. Unless ids are made of positions, nothing is written before the job has ended and all ids are
          known. The results stay in Redis, but those of a job that was submitted with `--drain`, or by `run`: these
          leave it as the table has them durably.

        Args:
            progress: as for :meth:`wait`.
            written: called with each chunk that is written: durably in a database, in a file or part otherwise, which
                may not be durable yet.
            refused: called with each record that the destination does not take.
            duplicates: of a table, which record is written if several have the same id: error, first or last; or
                `position`, which makes each id of the job and the record's position.
            dtype: how vectors are stored: float32, float16 or, in an array or parquet, int8 or binary, which PostgreSQL
                and LanceDB take too. None: that of the parts that are there, else float32. All parts of a job have one
                type. What reads results from them later restores float32; of binary, only the signs.
            ranges: of int8, the lowest and the highest value of each component: float, 2 × dimensions. None: those of
                the parts that are there, else of the job's first 100,000 records, or, in parts, of as many as Redis
                holds at once.

        Returns:
            What became of the records, in numbers, and the full names of the files or of the parts and their manifest.

        Raises:
            SettingsError: an argument is none of these or not for such a destination, the URL holds a password, or the
                job was made of a batch file, whose answers only a `.jsonl` holds.
            InputError: ids are missing, or not unique. Nothing is written.
            JobHeld: another process drains the job.
            JobDrained: results have left Redis for another place, or the table has lost some that have left for it.
            OtherContract: the table is bound to another model's vectors. Nothing is written.
            DestinationUnavailable: the database was away at each of several tries.
            OutputError: the destination can't be written, or holds something else; parts store vectors of another type,
                or were changed or removed; too few records have a vector for the ranges; a table has other columns,
                refuses all records alike, or does not hold what it has acknowledged.
            MissingExtra: a package for it is not installed.
            JobFailed: the job's error budget ended it before it was done; what is done is written.
            JobCancelled, JobLost, JobStalled: as for :meth:`iter_results`; the parts so far stay.
        """
        from embedctl.destinations import keyed, rows
        from embedctl.destinations.files import fetch
        from embedctl.destinations.formats import followed, is_file
        from embedctl.destinations.loop import Callbacks, ignore
        from embedctl.destinations.numbers import numbers_of
        from embedctl.destinations.place import place_of
        from embedctl.destinations.registry import destination_of, is_database

        where, callbacks = os.fspath(to), Callbacks(progress, written or ignore, refused or ignore)
        if is_database(where):
            if ranges is not None:
                raise SettingsError("ranges are for files and parts, and not for a database")
            options = rows.Options.of(duplicates, dtype)
            table = destination_of(where, self._broker.settings)
            return keyed.deliver(self._waiter, table, options, callbacks)
        if duplicates != "error":
            raise SettingsError(f"duplicates={duplicates!r} is for the URL of a database")
        numbers = numbers_of(dtype, ranges)
        if is_file(where):
            return fetch(self, followed(Path(where)), callbacks, numbers=numbers)
        from embedctl.destinations.parts import drain

        return drain(self._waiter, place_of(where), callbacks, numbers=numbers)

    def stored_numbers(self) -> Numbers:
        """How the parts of a drained job store its vectors: a type and, of int8, the ranges. Float32 if there is none.

        Raises:
            JobDrained: the parts can't be read here.
            MissingExtra: pyarrow is not installed.
        """
        from embedctl.destinations.part_reader import numbers_of_parts

        return numbers_of_parts(self._broker.drains, self._id)

    def vectors(self) -> Vectors:
        """Every vector: float32, records × dimensions, in input order. The row of a record that failed, or that was
        not encoded because the job was stopped, is NaN.

        Raises:
            SettingsError: the job was submitted without dense vectors.
            JobUnfinished: the job has not ended.
            JobFailed: every record failed, or the job's error budget ended it before it was done.
            JobCancelled, JobLost: as for :meth:`iter_results`.
        """
        status, vectors = self._reader.empty_vectors()
        for _ in self._reader.fill(status, vectors):
            pass
        return vectors

    def sparse(self) -> Iterator[SparseRecord]:
        """The sparse vector of each record that has one, in input order, as soon as it is there; holds one chunk at a
        time. `scipy.sparse.csr_array` and databases take indices and weights as they are.

        Raises:
            SettingsError: the job was submitted without sparse vectors.
            JobCancelled, JobFailed, JobLost, JobStalled: as for :meth:`iter_results`.
        """
        for chunk in self.iter_results():
            yield from sparse_records(chunk)

    def multi(self) -> Iterator[MultiRecord]:
        """As :meth:`sparse`, of multi-vectors: one vector for each token."""
        for chunk in self.iter_results():
            yield from multi_records(chunk)

    def iter_errors(self, *, chunks: int | None = None) -> Iterator[FailedRecord]:
        """The records of an ended job that have no vector, in input order; holds one chunk at a time. With `chunks`,
        those of so many first chunks alone.

        If the job's error budget ended it, or somebody stopped it, these are the records that had failed until then.

        Raises:
            JobUnfinished: the job has not ended.
            JobCancelled, JobLost: as for :meth:`iter_results`.
        """
        for errors in self._reader.errors_by_chunk(most=chunks):
            yield from errors

    def errors(self) -> list[FailedRecord]:
        """The records without a vector, in input order; see :meth:`iter_errors`."""
        return list(self.iter_errors())

    def retry_failed(self, timeout: float | None = None) -> int:
        """Queue the failed records again; returns how many they are. Holds no text, whatever the job's size.

        Args:
            timeout: longest wait for a Redis that is away or full (seconds). None waits two minutes while Redis is
                away, and without limit while it is full. What was queued until then goes on, and another call queues
                the rest.

        Raises:
            JobUnfinished: the job has not ended.
            JobCancelled: it was cancelled.
            JobFailed, JobStopped: its error budget, or somebody, ended it.
            JobError: another process retries it.
            WaitTimeout: Redis was away or full until the time was over.
        """
        self._waiter.forget()
        return retry_failed(self._waiter, TimeLimit.from_now(timeout))

    def stop(self) -> JobStatus:
        """End the job now, and keep what is done: its vectors can be fetched, and its corpus can resume it. Workers
        stop at their next batch, and text that is not encoded is freed. An ended job stays as it is.

        Raises:
            JobCancelled: the job was cancelled.
        """
        self._broker.jobs.stop(self._id)
        return self.status()

    def cancel(self) -> JobStatus:
        """End the job now. Workers stop at their next batch, and what was stored is freed. An ended job stays as it
        is."""
        self._broker.jobs.cancel(self._id)
        self._waiter.forget()
        status = self.status()
        if status.state is JobState.CANCELLED:  # else it ended before, or Redis has lost the cancellation by now
            self._broker.upkeep.free(self._id, status.chunks, if_ended_early=True)
        return status

    def discard(self) -> None:
        """Free the job and everything stored for it, now."""
        self._discard(self._waiter.ended_lately())

    def _discard(self, ended: JobStatus | None) -> None:
        """As :meth:`discard`, in one round trip if the job is small. `ended` is its status, if it was seen to have
        ended a moment ago."""
        self._waiter.forget()
        if ended is not None and self._broker.upkeep.remove_complete([ended]):
            return
        try:
            self._broker.jobs.cancel(self._id)  # first, so that no producer adds to it any more
            self._free()
        except (BrokerRefused, JobDamaged):
            if not self._broker.jobs.is_damaged(self._id):
                raise
            self._broker.upkeep.remove_damaged(self._id)
        self._broker.upkeep.remove(self._id)

    def _free(self) -> None:
        self._waiter.forget()
        self._broker.upkeep.free(self._id, self._broker.jobs.status(self._id).chunks)
