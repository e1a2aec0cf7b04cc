"""Writes a job's results to a file, during the job or after its end."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from embedctl.corpus.batch import BATCH_FORMAT
from embedctl.destinations.answers import Answers, ReadRequests, is_of_batch
from embedctl.destinations.formats import (
    guess_format,
    refuse_no_file,
    refuse_numbers,
    refuse_outputs,
    refuse_to_clobber,
    writer_of,
)
from embedctl.destinations.interface import Contract
from embedctl.destinations.jsonl import JsonlWriter, is_stdout
from embedctl.destinations.loop import NOBODY, BeginAgain, Callbacks, Delivered, Progress, RefusedRecord, Taker, run
from embedctl.destinations.npy import ARRAYS
from embedctl.destinations.numbers import FLOAT32, Dtype, Numbers, agreed, ranges_of
from embedctl.destinations.unfinished import locked
from embedctl.destinations.writer import Content, Writer
from embedctl.store import JobStatus
from embedctl.waiting.results import ChunkVectors
from embedctl_config.errors import (
    BrokerUnavailable,
    JobError,
    JobFailed,
    JobNotFound,
    JobStalled,
    OutputError,
    SettingsError,
)
from embedctl_config.outputs import asked_by


class Readable(Protocol):
    """A job, as far as outputs ask it; the methods are those of :class:`Job`."""

    @property
    def id(self) -> str: ...

    def status(self) -> JobStatus: ...

    def iter_results(self, *, progress: Progress | None = None) -> Iterator[ChunkVectors]: ...

    def wait_until_sealed(self, progress: Progress | None = None) -> JobStatus: ...

    def wait(self, timeout: float | None = None, progress: Progress | None = None) -> JobStatus: ...

    def stored_numbers(self) -> Numbers: ...


def fetch(
    job: Readable,
    path: Path,
    callbacks: Callbacks = NOBODY,
    *,
    file_format: str | None = None,
    clobber: bool = True,
    numbers: Numbers | None = None,
    requests: ReadRequests | None = None,
) -> Delivered:
    """Write a job's results to a file, or to standard output, as they arrive, in input order; arguments and errors are
    those of :meth:`Job.deliver` unless told here. Memory holds one chunk at a time (parquet: a row group, some 64 MB).

    Waits for unfinished chunks. If a fetch dies, the next one begins again: all results are still in Redis.

    Args:
        path: `-` and `/dev/stdout` are standard output, which is written from the job's first chunk on.
        file_format: npy, npz, jsonl, parquet or openai-batch; by the path's suffix if None. A job made of a batch file
            is written as openai-batch where others are as jsonl. Standard output takes these two alone.
        clobber: whether to replace a file that exists.
        numbers: how vectors are stored. From parts, float32 is restored, but not from those of binary; any other
            type must be that of the parts.
        requests: of openai-batch, reads the requests that the job was made of. Those that were not run, because the
            job ended or is gone, then have a line.

    Returns:
        What became of the records, and the written files, `path` first; none for standard output.

    Raises:
        InputError: `requests` are not those of the job, or can't be read.
        BrokenPipeError: nobody reads standard output any more.
        JobNotFound, JobLost, JobStalled: the job is gone, or its producer is. What was fetched stays where the
            message says, and no other fetch writes there.
    """
    chosen = file_format or guess_format(path)
    answers = _answers(job, chosen, guessed=file_format is None, requests=requests)
    if answers is not None:
        chosen = BATCH_FORMAT
    stored = job.stored_numbers() if job.status().drained_to is not None else FLOAT32
    from_parts = _taken_from_parts(numbers, stored)
    if stored.kind is not Dtype.FLOAT32:
        numbers = agreed(numbers, stored, job.id, restores=True)
    numbers = numbers or FLOAT32
    refuse_numbers(path, chosen, numbers, stored)
    refuse_outputs(path, chosen, asked_by(job.status().options))
    if is_stdout(path) and chosen not in ("jsonl", BATCH_FORMAT):
        raise SettingsError(f"standard output takes jsonl, not {chosen}: name a file with the suffix .{chosen}")
    with _kept_from_others(path):
        if not (clobber or is_stdout(path)):
            # Again, because another process may have written the file since the command began.
            refuse_to_clobber(path, chosen)
        if numbers.kind is Dtype.INT8 and numbers.ranges is None:
            ranges, _ = ranges_of(_up_to_its_end(job, callbacks.progress), f"job {job.id}")
            numbers = Numbers(numbers.kind, ranges)
        if chosen in ARRAYS:  # its array has a row for each record
            job.wait_until_sealed(callbacks.progress)
        content = Content.of(job.status(), path, numbers, lambda: Contract.of(job.status()))
        writer = writer_of(chosen)(content) if answers is None else JsonlWriter(content, answers)
        file = _File(job, path, writer, numbers, from_parts, callbacks)
        try:
            run(partial(job.iter_results, progress=callbacks.progress), file, job.status)
        except BaseException:
            writer.discard()
            raise
        return file.done


@contextmanager
def _kept_from_others(path: Path) -> Iterator[None]:
    """Keep other processes from writing a file meanwhile, unless it is standard output. OutputError: it can't be
    written."""
    if is_stdout(path):
        yield
        return
    refuse_no_file(path)
    try:
        with locked(path):
            yield
    except BrokerUnavailable:  # also an OSError, but one of Redis
        raise
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror or error}") from error


def _answers(job: Readable, chosen: str, *, guessed: bool, requests: ReadRequests | None) -> Answers | None:
    """The answers to a batch file, if they are asked for; they are where jsonl is only guessed."""
    status = job.status() if chosen in ("jsonl", BATCH_FORMAT) else None
    if status is not None and is_of_batch(status) and (guessed or chosen == BATCH_FORMAT):
        return Answers(status, job.status, requests)
    if chosen == BATCH_FORMAT:
        raise SettingsError(
            f"job {job.id} was not made of a batch file, so it has no requests to answer: choose another format"
        )
    if requests is not None:
        raise SettingsError(
            "requests are for the answers to a batch file: leave out --input-file (requests= in Python)"
        )
    return None


def _taken_from_parts(numbers: Numbers | None, stored: Numbers) -> Collection[str]:
    """The types in parts that vectors are taken from. A part that is written from now on may have any."""
    if numbers is not None and numbers.kind is Dtype.FLOAT32:
        return Dtype.FLOAT16, Dtype.INT8  # they are to be restored
    return () if stored.kind is Dtype.FLOAT32 else (stored.kind,)


@dataclass
class _File(Taker[ChunkVectors]):
    job: Readable
    _path: Path
    writer: Writer
    _numbers: Numbers
    _from_parts: Collection[str]
    _callbacks: Callbacks
    _chunks: int = 0
    _named: int = -1  # the position of the last record that was refused
    done: Delivered = field(default_factory=Delivered)

    def take(self, chunk: ChunkVectors) -> None:
        if chunk.stored_as and chunk.stored_as not in self._from_parts:
            raise OutputError(
                f"job {self.job.id} was drained as {chunk.stored_as} since this fetch began: fetch it once more, "
                "without a dtype"
            )
        chunk, refused = self._numbers.fitting(chunk)
        try:
            self.writer.write(chunk)
        except BeginAgain:
            self._chunks, self.done = 0, Delivered()
            raise
        self._chunks += 1
        self.done.written += len(chunk.positions) - len(chunk.errors)
        self.done.failed += len(chunk.errors) - len(refused)
        self.done.refused += len(refused)
        for each in refused:
            if each.position > self._named:  # after BeginAgain, it has been named
                self._callbacks.refused(RefusedRecord(each.position, each.id, each.message))
                self._named = each.position
        self._callbacks.written(chunk)

    def end(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.done.files = self.writer.finish()

    def cut_short(self, error: JobError) -> None:
        gives_up = self.writer.gives_up(error)
        if gives_up or isinstance(error, JobFailed):  # its error budget ended it, and what was paid for is kept
            self.close()
            if self.done.files:
                there = "Each request has a line, in {} or beside it" if gives_up else "What is done is in {}"
                raise type(error)(f"{str(error).rstrip('.')}. {there.format(self._path)}") from error
        elif isinstance(error, JobNotFound | JobStalled) and self._chunks:  # what was fetched may be the only copy
            kept = self.writer.keep(self.job.id)
            if kept is not None:
                raise type(error)(f"{error} The {self._chunks} chunks fetched so far stay in {kept}.") from error


def _up_to_its_end(job: Readable, progress: Progress | None) -> Iterator[ChunkVectors]:
    """A job's results, also if its error budget ends it."""
    with suppress(JobFailed):
        yield from job.iter_results(progress=progress)
