"""Writes a job's results to a file, during the job or after its end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

from embedctl.corpus.batch import BATCH_FORMAT
from embedctl.kept import tells_tokens
from embedctl.output.about import About
from embedctl.output.batch import Answers, BatchWriter, errors_beside, is_of_batch
from embedctl.output.jsonl import lines_of
from embedctl.output.not_run import ReadRequests
from embedctl.output.npy import all_beside, deleted_beside
from embedctl.output.numbers import FLOAT32, Numbers, OutputType, ranges_of
from embedctl.output.parts import BeginAgain, Progress, locked, part_of
from embedctl.output.standard import check_stdout, is_stdout, print_lines, print_results
from embedctl.output.writer import Content, Writer
from embedctl.results import ChunkVectors
from embedctl.store import JobStatus
from embedctl_config.errors import (
    BrokerUnavailable,
    JobCancelled,
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
_MakeWriter = Callable[[Content], Writer]
#: A job's results, without so many chunks.
_Results = Callable[[int], Iterator[ChunkVectors]]
#: After a fetch died, the next one repeats at most this much of its work (seconds).
_NOTE_EVERY_S = 2.0
#: Of which stop of its job an unfinished file leaves out chunks, in a note of progress; _NO_STOP is none of them.
_STOP, _NO_STOP = "stop", -1


class Readable(Protocol):
    """A job, as far as outputs ask it; the methods are those of :class:`Job`."""

    @property
    def id(self) -> str: ...

    def status(self) -> JobStatus: ...

    def iter_results(
        self, *, start: int = 0, progress: Callable[[JobStatus], None] | None = None
    ) -> Iterator[ChunkVectors]: ...

    def wait_until_sealed(self, progress: Callable[[JobStatus], None] | None = None) -> JobStatus: ...

    def stored_numbers(self) -> Numbers: ...


def fetch(
    job: Readable,
    path: Path,
    *,
    file_format: str | None = None,
    one_file: bool = False,
    progress: Callable[[JobStatus], None] | None = None,
    written: Callable[[ChunkVectors], None] | None = None,
    clobber: bool = True,
    numbers: Numbers | None = None,
    requests: ReadRequests | None = None,
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
        numbers: how vectors are stored. None: as the job's parts store them, else as float32. Int8 without ranges takes
            those of the parts, else of the first 100,000 records. From parts, float32 is restored, but not from those
            of ubinary; any other type must be that of the parts.
        requests: of openai-batch, reads the requests that the job was made of. Those that were not run, because the job
            ended or is gone, then have a line.

    Returns:
        The written files, `path` first; none for standard output.

    Raises:
        SettingsError: the job has no such format, or its parts no such numbers.
        InputError: `requests` are not those of the job, or can't be read.
        OutputError: the file can't be written, exists and must not be replaced, or another fetch is writing it.
        BrokenPipeError: nobody reads standard output any more.
        MissingExtra: parquet without pyarrow.
        JobFailed: the job's error budget ended it; what is done is in the file.
        JobCancelled, BrokerUnavailable: as for :meth:`Job.iter_results`.
        JobNotFound, JobLost, JobStalled: the job is gone, or its producer is. What was fetched stays where the message
            says.
    """
    chosen = file_format or guess_format(path)
    answers = _answers(job, chosen, guessed=file_format is None, one_file=one_file, requests=requests)
    if answers is not None:
        chosen = BATCH_FORMAT
    stored = job.stored_numbers() if job.status().drained_to is not None else FLOAT32
    results = partial(_results, job, progress, written, _taken_from_parts(numbers, stored))
    numbers = _agreed(job, numbers, stored)
    _refuse_numbers(path, chosen, numbers, stored)
    if is_stdout(path):
        if chosen not in ("jsonl", BATCH_FORMAT):
            raise SettingsError(f"standard output takes jsonl, not {chosen}: name a file with the suffix .{chosen}")
        if answers is None:
            print_results(results(0), lines_of)
        else:
            _print_answers(results(0), answers())
        return []
    try:
        with locked(path):
            if not clobber:
                # Again, because another process may have written the file, or a part of it, since the command began.
                _refuse_to_clobber(path, "jsonl" if one_file else chosen)
                _refuse_part_of_another(path, job)
            if numbers.kind is OutputType.INT8 and numbers.ranges is None:
                ranges, _ = ranges_of(_up_to_its_end(job, progress), f"job {job.id}")
                numbers = Numbers(numbers.kind, ranges)
            if chosen == "npy":  # its array has a row for each record
                job.wait_until_sealed(progress)
            make_writer: _MakeWriter = (
                _writer(chosen) if answers is None else partial(BatchWriter, make_answers=answers, one_file=one_file)
            )
            return _fetch(job, path, f"{chosen}, one file" if one_file else chosen, make_writer, results, numbers)
    except BrokerUnavailable:  # also an OSError, but one of Redis
        raise
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror or error}") from error


def holds_kept_fields(path: Path) -> bool:
    """Whether the format of this path has room for kept fields."""
    return guess_format(path) != "npy"


def check_output(
    path: Path, keep: Sequence[str] = (), *, clobber: bool = True, numbers: Numbers | None = None, batch: bool = False
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
    _refuse_numbers(path, file_format, numbers or FLOAT32)
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
    return [path, deleted_beside(path), *(all_beside(path) if path.suffix == ".npy" else ())]


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


def _answers(
    job: Readable, chosen: str, *, guessed: bool, one_file: bool, requests: ReadRequests | None
) -> Callable[..., Answers] | None:
    """Makes the answers to a batch file, if they are asked for; they are where jsonl is only guessed.

    Raises:
        SettingsError: they are asked for, and the job was not made of a batch file.
    """
    status = job.status() if chosen in ("jsonl", BATCH_FORMAT) else None
    if status is not None and is_of_batch(status) and (guessed or chosen == BATCH_FORMAT):
        return partial(Answers, status, job.status, requests)
    if chosen == BATCH_FORMAT:
        raise SettingsError(
            f"job {job.id} was not made of a batch file, so it has no requests to answer: choose another format"
        )
    if requests is not None:
        raise SettingsError(
            "requests are for the answers to a batch file: leave out --input-file (requests= in Python)"
        )
    if one_file:
        raise SettingsError("one file is for the answers to a batch file: omit --one-file (one_file= in Python)")
    return None


def _writer(file_format: str) -> _MakeWriter:
    module, _, name = _WRITERS[file_format].partition(":")
    writer: _MakeWriter = getattr(import_module(module), name)
    return writer


def _agreed(job: Readable, numbers: Numbers | None, stored: Numbers) -> Numbers:
    """How vectors are written of which some are in parts.

    Raises:
        SettingsError: they can't be written as they are asked for.
    """
    if numbers is None or stored.kind is OutputType.FLOAT32:
        return numbers or stored
    if numbers.kind is OutputType.FLOAT32:
        if stored.kind is OutputType.UBINARY:
            raise SettingsError(f"job {job.id} was drained as ubinary, and float32 can't be restored from that")
        return numbers
    if numbers.kind is not stored.kind:
        raise SettingsError(
            f"job {job.id} was drained as {stored.kind}: omit the output type {numbers.kind}, or choose float32 to "
            "have the vectors restored"
        )
    if numbers.ranges is not None and numbers.mark() != stored.mark():
        raise SettingsError(f"job {job.id} was drained with other ranges: omit the ranges")
    return stored


def _taken_from_parts(numbers: Numbers | None, stored: Numbers) -> Collection[str]:
    """The types in parts that vectors are taken from. A part that is written from now on may have any."""
    if numbers is not None and numbers.kind is OutputType.FLOAT32:
        return OutputType.FLOAT16, OutputType.INT8  # they are to be restored
    return () if stored.kind is OutputType.FLOAT32 else (stored.kind,)


def _results(
    job: Readable,
    progress: Callable[[JobStatus], None] | None,
    written: Callable[[ChunkVectors], None] | None,
    from_parts: Collection[str],
    start: int,
) -> Iterator[ChunkVectors]:
    """The results from a chunk on. `written` is called with each when the next one is asked for.

    Raises:
        OutputError: vectors are not what the file is to hold, because the job was drained since the fetch began.
    """
    for chunk in job.iter_results(start=start, progress=progress):
        if chunk.stored_as and chunk.stored_as not in from_parts:
            raise OutputError(
                f"job {job.id} was drained as {chunk.stored_as} since this fetch began: fetch it once more, without an "
                "output type"
            )
        yield chunk
        if written is not None:
            written(chunk)


def _refuse_numbers(path: Path, file_format: str, numbers: Numbers, stored: Numbers = FLOAT32) -> None:
    if file_format in ("jsonl", BATCH_FORMAT) and numbers.kind is not OutputType.FLOAT32:
        where = "standard output" if is_stdout(path) else path
        if stored.kind is not OutputType.FLOAT32:
            more = "" if stored.kind is OutputType.UBINARY else ", or have them restored with the output type float32"
            raise SettingsError(
                f"the vectors were drained as {stored.kind}, and {where} takes float32 alone: name the output .npy or "
                f".parquet{more}"
            )
        raise SettingsError(f"{where} takes float32 alone: name the output .npy or .parquet for {numbers.kind}")


def _refuse_to_clobber(path: Path, file_format: str) -> None:
    others = {"npy": [*all_beside(path)], BATCH_FORMAT: [errors_beside(path)]}
    for file in (path, *others.get(file_format, ())):
        if os.path.lexists(file):
            raise OutputError(f"{file} exists: remove it, choose another file, or omit --no-clobber to replace it")


def _refuse_part_of_another(path: Path, job: Readable) -> None:
    """Refuse to begin again over what an earlier fetch of another job has written."""
    if other := Progress(path, {"job": job.id}).other("job"):
        raise OutputError(
            f"{part_of(path)} holds vectors of job {other}, which is not fetched in full: choose another file, or "
            "omit --no-clobber to replace them"
        )


def _fetch(
    job: Readable,
    path: Path,
    file_format: str,
    make_writer: _MakeWriter,
    results: _Results,
    numbers: Numbers,
) -> list[Path]:
    status = job.status()
    # A retry of failed records may change rows that an earlier fetch has written.
    retried = status.chunks - (status.original_chunks or status.chunks)
    note = Progress(path, {"job": job.id, "format": file_format, "retried": retried, **numbers.mark()})
    content = Content(
        path,
        status.records,
        keep=status.options.get("keep", ()),
        numbers=numbers,
        tokens=tells_tokens(status.options),
        about=(lambda: About.of(job.status())) if status.options.get("digests") else None,
    )
    writer, taken_up_at = _taken_up(make_writer, content, status, note)
    chunks, stopped = taken_up_at, _stop_noted(note)
    failed: JobError | None = None
    next_note = time.monotonic() + _NOTE_EVERY_S
    try:
        try:
            for chunks, records in _written(results, writer, taken_up_at, note):
                if not records and not stopped:
                    stopped = _stop_of(job.status()) or _NO_STOP
                if time.monotonic() >= next_note:
                    facts = writer.checkpoint()
                    if facts is not None:
                        note.save({"chunks": chunks, _STOP: stopped, **facts})
                    next_note = time.monotonic() + _NOTE_EVERY_S
        except JobFailed as error:  # its error budget ended it, and what was paid for is kept
            failed = JobFailed(f"{error}. What is done is in {path}")
        except (JobCancelled, JobNotFound) as error:
            if not (isinstance(writer, BatchWriter) and writer.give_up(error)):
                raise
            failed = type(error)(f"{str(error).rstrip('.')}. Each request has a line, in {path} or beside it")
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
        if facts is not None:
            note.save({"chunks": chunks, _STOP: stopped, **facts})
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


def _print_answers(chunks: Iterator[ChunkVectors], answers: Answers) -> None:
    try:
        print_results(chunks, answers.lines)
    except JobFailed:
        print_lines(answers.last_lines())
        raise
    except JobError as error:
        if answers.give_up(error):
            print_lines(answers.last_lines())
        raise
    print_lines(answers.last_lines())


def _stop_noted(note: Progress) -> int:
    """Of which stop of its job an unfinished file leaves out chunks; 0 if it leaves out none."""
    return (note.load() or {}).get(_STOP, 0)


def _stop_of(status: JobStatus) -> int:
    """When a job was ended before its last record, in milliseconds; 0 if it was not. A stopped job may go on."""
    if status.stopped_by is None or status.ended_at is None:
        return 0
    return round(status.ended_at.timestamp() * 1000)


def _up_to_its_end(job: Readable, progress: Callable[[JobStatus], None] | None) -> Iterator[ChunkVectors]:
    """A job's results, also if its error budget ends it."""
    with suppress(JobFailed):
        yield from job.iter_results(progress=progress)


def _written(results: _Results, writer: Writer, chunks: int, note: Progress) -> Iterator[tuple[int, int]]:
    """Write the chunks after the first `chunks`; after each, yield how many the writer holds, and its records."""
    while True:
        try:
            for chunk in results(chunks):
                writer.write(chunk)
                chunks += 1
                yield chunks, len(chunk.positions)
        except BeginAgain:
            note.clear()
            chunks = 0
        else:
            return


def _taken_up(make_writer: _MakeWriter, content: Content, status: JobStatus, note: Progress) -> tuple[Writer, int]:
    """A writer, and the number of chunks that it holds already; 0 if the files do not match their progress note."""
    path, noted = content.path, note.load()
    if noted is not None and _stop_noted(note) not in (0, _stop_of(status)):
        log.warning("%s: the job went on since an earlier fetch left out what was missing; beginning again", path)
    elif noted is not None:
        try:
            return make_writer(replace(content, noted=noted)), noted["chunks"]
        except (OSError, ValueError):
            log.warning("%s: can't continue an earlier fetch; beginning again", path)
    elif note.is_of_other_numbers():
        log.warning("%s was begun with another --output-type or other ranges; beginning again", path)
    # From here on, the part files belong to this fetch, so no later fetch may trust an older progress note.
    note.clear()
    return make_writer(content), 0
