"""Writes a job's results to a file, during the job or after its end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Protocol

from embedctl.corpus.batch import BATCH_FORMAT
from embedctl.job import Job
from embedctl.kept import tells_tokens
from embedctl.output.batch import BatchFormat, errors_beside, is_of_batch
from embedctl.output.npy import all_beside
from embedctl.output.numbers import FLOAT32, Numbers, OutputType, ranges_of
from embedctl.output.parts import BeginAgain, Progress, locked, part_of
from embedctl.output.standard import check_stdout, is_stdout, print_results
from embedctl.results import ChunkVectors
from embedctl.store import JobStatus
from embedctl_config.errors import (
    BrokerUnavailable,
    JobError,
    JobFailed,
    JobNotFound,
    JobStalled,
    OutputError,
    SettingsError,
)

log = logging.getLogger(__name__)

_WRITERS = {
    "npy": "embedctl.output.npy:NpyWriter",
    "jsonl": "embedctl.output.jsonl:JsonlWriter",
    "parquet": "embedctl.output.parquet:ParquetWriter",
}
FORMATS = tuple(_WRITERS)
#: After a fetch died, the next one repeats at most this much of its work (seconds).
_NOTE_EVERY_S = 2.0


class Format(Protocol):
    """Makes a writer.

    Its arguments are the final path, the number of the job's records, the last checkpoint, or None, the names of the
    job's kept fields, how vectors are stored, and whether columns tell the tokens of each record.
    """

    #: Whether the number of records must be known before the first chunk is written.
    needs_total: bool

    def __call__(
        self,
        path: Path,
        records: int,
        noted: Mapping[str, int] | None,
        keep: Sequence[str] = (),
        numbers: Numbers = FLOAT32,
        *,
        tokens: bool = False,
    ) -> Writer: ...


class Writer(Protocol):
    """Writes chunks under a temporary name."""

    def write(self, chunk: ChunkVectors) -> None:
        """Add a chunk; BeginAgain if the writer needs all chunks once more, from the first one."""
        ...

    def checkpoint(self) -> Mapping[str, int] | None:
        """Flush. Returns what a new writer needs to go on from here, or None if it can't.

        If that writer needs more than the chunks after these, `chunks` is the number of those that it does not need.
        """
        ...

    def finish(self) -> list[Path]:
        """Give the files their final names, and return these."""
        ...

    def close(self) -> None:
        """Close the files, and keep them."""
        ...

    def discard(self) -> None:
        """Remove the files."""
        ...


def fetch(
    job: Job,
    path: Path,
    *,
    file_format: str | None = None,
    one_file: bool = False,
    progress: Callable[[JobStatus], None] | None = None,
    written: Callable[[ChunkVectors], None] | None = None,
    clobber: bool = True,
    numbers: Numbers = FLOAT32,
) -> list[Path]:
    """Write a job's results to a file, or to standard output, as they arrive, in input order. Memory holds one chunk at
    a time (parquet: a row group, some 64 MB).

    Waits for unfinished chunks. If a fetch dies, the next one to the same file continues where it stopped (parquet:
    with the last row group that was written).

    Args:
        path: `-` and `/dev/stdout` are standard output, which is written from the job's first chunk on.
        file_format: npy, jsonl, parquet or openai-batch; by the path's suffix if None. A job made of a batch file is
            written as openai-batch where others are as jsonl. Standard output takes these two alone.
        one_file: of openai-batch, write failed requests among the others, as on standard output.
        progress: as for :meth:`Job.wait`.
        written: called with each chunk once it is in the file.
        clobber: whether to replace a file that exists, and the unfinished file of another job.
        numbers: how vectors are stored. Int8 without ranges takes those of the first 100,000 records.

    Returns:
        The written files, `path` first; none for standard output.

    Raises:
        SettingsError: the job has no such format.
        OutputError: the file can't be written, exists and must not be replaced, or another fetch is writing it.
        BrokenPipeError: nobody reads standard output any more.
        MissingExtra: parquet without pyarrow.
        JobFailed: the job's error budget ended it; what is done is in the file.
        JobCancelled, BrokerUnavailable: as for :meth:`Job.iter_results`.
        JobNotFound, JobLost, JobStalled: the job is gone, or its producer is. What was fetched stays where the message
            says.
    """
    chosen = file_format or guess_format(path)
    batch = _batch(job, chosen, guessed=file_format is None, one_file=one_file)
    if batch is not None:
        chosen = BATCH_FORMAT
    _refuse_numbers(path, chosen, numbers)
    if is_stdout(path):
        if chosen not in ("jsonl", BATCH_FORMAT):
            raise SettingsError(f"standard output takes jsonl, not {chosen}: name a file with the suffix .{chosen}")
        if batch is None:
            print_results(job, progress, written)
        else:
            answers = batch.answers()
            print_results(job, progress, written, answers.lines, answers.last_lines())
        return []
    try:
        with locked(path):
            if not clobber:
                # Again, because another process may have written the file, or a part of it, since the command began.
                _refuse_to_clobber(path, "jsonl" if one_file else chosen)
                _refuse_part_of_another(path, job)
            if numbers.kind is OutputType.INT8 and numbers.ranges is None:
                numbers = Numbers(numbers.kind, ranges_of(_up_to_its_end(job, progress), f"job {job.id}"))
            noted_as = f"{chosen}, one file" if one_file else chosen
            return _fetch(job, path, noted_as, batch or _writer(chosen), progress, written, numbers)
    except BrokerUnavailable:  # also an OSError, but one of Redis
        raise
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror or error}") from error


def holds_kept_fields(path: Path) -> bool:
    """Whether the format of this path has room for kept fields."""
    return guess_format(path) != "npy"


def check_output(
    path: Path, keep: Sequence[str] = (), *, clobber: bool = True, numbers: Numbers = FLOAT32, batch: bool = False
) -> None:
    """Check beforehand that vectors, and these kept fields, can be written to a path.

    Args:
        batch: whether a .jsonl file will be one of requests, with another one beside it.
        clobber: whether files that exist may be replaced.

    Raises:
        SettingsError: the path has no suffix of a known format, or the format has no room for kept fields or no such
            numbers.
        OutputError: the folder is missing, or not writable; a file exists that must not be replaced; standard output is
            closed.
        MissingExtra: parquet without pyarrow.
    """
    file_format = guess_format(path)
    _writer(file_format)
    _refuse_numbers(path, file_format, numbers)
    if keep and not holds_kept_fields(path):
        raise SettingsError(
            f"{path} can't hold the kept fields ({', '.join(keep)}): name the output .jsonl or .parquet, or leave out "
            "--keep"
        )
    if is_stdout(path):
        check_stdout()
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise OutputError(f"{path} can't be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK) or path.is_dir():
        raise OutputError(f"{path} can't be written: permission denied, or it is a folder")
    if not clobber:
        _refuse_to_clobber(path, BATCH_FORMAT if batch and file_format == "jsonl" else file_format)


def files_of(path: Path) -> list[Path]:
    """The files that :func:`fetch` may write for a path, `path` first; none for standard output."""
    if is_stdout(path):
        return []
    return [path, *(all_beside(path) if path.suffix == ".npy" else ())]


def guess_format(path: Path) -> str:
    """The format by a file's suffix; jsonl for standard output.

    Raises:
        SettingsError: the suffix is unknown.
    """
    if is_stdout(path):
        return "jsonl"
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise SettingsError(f"{path}: name it .{', .'.join(FORMATS)}, or - for standard output (jsonl)")
    return suffix


def _batch(job: Job, chosen: str, *, guessed: bool, one_file: bool) -> BatchFormat | None:
    """The format of a batch file's answers, if they are asked for; they are where jsonl is only guessed.

    Raises:
        SettingsError: they are asked for, and the job was not made of a batch file.
    """
    status = job.status() if chosen in ("jsonl", BATCH_FORMAT) else None
    if status is not None and is_of_batch(status) and (guessed or chosen == BATCH_FORMAT):
        return BatchFormat(status, one_file=one_file)
    if chosen == BATCH_FORMAT:
        raise SettingsError(
            f"job {job.id} was not made of a batch file, so it has no requests to answer: choose another format"
        )
    if one_file:
        raise SettingsError("one file is for the answers to a batch file: omit --one-file (one_file= in Python)")
    return None


def _writer(file_format: str) -> Format:
    module, _, name = _WRITERS[file_format].partition(":")
    writer: Format = getattr(import_module(module), name)
    return writer


def _refuse_numbers(path: Path, file_format: str, numbers: Numbers) -> None:
    if file_format in ("jsonl", BATCH_FORMAT) and numbers.kind is not OutputType.FLOAT32:
        where = "standard output" if is_stdout(path) else path
        raise SettingsError(f"{where} takes float32 alone: name the output .npy or .parquet for {numbers.kind}")


def _refuse_to_clobber(path: Path, file_format: str) -> None:
    others = {"npy": [*all_beside(path)], BATCH_FORMAT: [errors_beside(path)]}
    for file in (path, *others.get(file_format, ())):
        if os.path.lexists(file):
            raise OutputError(f"{file} exists: remove it, choose another file, or omit --no-clobber to replace it")


def _refuse_part_of_another(path: Path, job: Job) -> None:
    """Refuse to begin again over what an earlier fetch of another job has written."""
    if other := Progress(path, {"job": job.id}).other("job"):
        raise OutputError(
            f"{part_of(path)} holds vectors of job {other}, which is not fetched in full: choose another file, or "
            "omit --no-clobber to replace them"
        )


def _fetch(
    job: Job,
    path: Path,
    file_format: str,
    make_writer: Format,
    progress: Callable[[JobStatus], None] | None,
    written: Callable[[ChunkVectors], None] | None,
    numbers: Numbers,
) -> list[Path]:
    if make_writer.needs_total:
        job.wait_until_sealed(progress)
    status = job.status()
    # A retry of failed records may change rows that an earlier fetch has written.
    retried = status.chunks - (status.original_chunks or status.chunks)
    note = Progress(path, {"job": job.id, "format": file_format, "retried": retried, **numbers.mark()})
    writer, taken_up_at = _taken_up(make_writer, path, status, note, numbers)
    chunks, whole, failed = taken_up_at, True, None
    next_note = time.monotonic() + _NOTE_EVERY_S
    try:
        try:
            for chunks, records in _written(job, writer, taken_up_at, note, progress, written):
                # A chunk that is missing may be there for the next fetch, because a stopped job can go on.
                whole = whole and records > 0
                if whole and time.monotonic() >= next_note:
                    facts = writer.checkpoint()
                    if facts is not None:
                        note.save({"chunks": chunks, **facts})
                    next_note = time.monotonic() + _NOTE_EVERY_S
        except JobFailed as error:  # its error budget ended it, and what was paid for is kept
            failed = JobFailed(f"{error}. What is done is in {path}")
        files = writer.finish()
    except BrokerUnavailable:  # the written part stays for the next fetch
        writer.close()
        raise
    except OSError:
        # The disk may be full: free the space. The file can't be trusted any more. Closing flushes, and fails again.
        with suppress(OSError):
            writer.close()
        writer.discard()
        note.clear()
        raise
    except (JobNotFound, JobStalled) as error:  # the fetched part may be the only copy; a lost or stalled job may go on
        if not chunks:
            writer.close()
            writer.discard()
            raise
        facts = writer.checkpoint()
        if whole and facts is not None:
            note.save({"chunks": chunks, **facts})
        writer.close()
        raise type(error)(f"{error} The {chunks} chunks fetched so far stay in {part_of(path)}.") from error
    except JobError:
        writer.close()
        writer.discard()
        note.clear()
        raise
    except BaseException:
        writer.close()
        raise
    note.clear()
    if failed is not None:
        raise failed
    return files


def _up_to_its_end(job: Job, progress: Callable[[JobStatus], None] | None) -> Iterator[ChunkVectors]:
    """A job's results, also if its error budget ends it."""
    with suppress(JobFailed):
        yield from job.iter_results(progress=progress)


def _written(
    job: Job,
    writer: Writer,
    chunks: int,
    note: Progress,
    progress: Callable[[JobStatus], None] | None,
    written: Callable[[ChunkVectors], None] | None,
) -> Iterator[tuple[int, int]]:
    """Write the chunks after the first `chunks`; after each, yield how many the writer holds, and its records."""
    while True:
        try:
            for chunk in job.iter_results(start=chunks, progress=progress):
                writer.write(chunk)
                if written is not None:
                    written(chunk)
                chunks += 1
                yield chunks, len(chunk.positions)
        except BeginAgain:
            note.clear()
            chunks = 0
        else:
            return


def _taken_up(
    make_writer: Format, path: Path, status: JobStatus, note: Progress, numbers: Numbers
) -> tuple[Writer, int]:
    """A writer, and the number of chunks that it holds already; 0 if the files do not match their progress note."""
    records, keep, tokens = status.records, status.options.get("keep", ()), tells_tokens(status.options)
    noted = note.load()
    if noted is not None:
        try:
            return make_writer(path, records, noted, keep, numbers, tokens=tokens), noted["chunks"]
        except (OSError, ValueError):
            log.warning("%s: can't continue an earlier fetch; beginning again", path)
    elif note.is_of_other_numbers():
        log.warning("%s was begun with another --output-type or other ranges; beginning again", path)
    # From here on, the part files belong to this fetch, so no later fetch may trust an older progress note.
    note.clear()
    return make_writer(path, records, None, keep, numbers, tokens=tokens), 0
