"""Waiting for jobs and writing their vectors, for several commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import click

from embedctl import output
from embedctl.corpus import BatchCorpus
from embedctl.drain.places import MANIFEST, Place
from embedctl.job import Job
from embedctl.overview import average
from embedctl.store import JobState, JobStatus
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import ExitStatus, OutputError


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of a job's records.

    Attributes:
        vectors, failed, truncated: numbers of records.
        dimensions: of a vector; None before there is one.
        seconds: from the job's start to its end, while it was encoded; None if it has not ended, or paused in between.
        records_per_s, tokens_per_s: the average over that time.
        continued_at: records that were done before the command took the job up; None if it took none up.
    """

    vectors: int
    dimensions: int | None
    failed: int
    truncated: int
    seconds: float | None
    records_per_s: float | None
    tokens_per_s: float | None
    continued_at: int | None


def wait_for(job: Job, progress: JobProgress, timeout: float | None = None) -> JobStatus:
    """Wait for a job, and show its progress.

    Raises:
        KeyboardInterrupt: says how to return to the job.
    """
    try:
        return job.wait(timeout, progress.running)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"job {job.id} goes on: embedctl wait {job.id}") from None


def check_destination(
    path: Path | Place,
    keep: Sequence[str],
    *,
    clobber: bool,
    as_json: bool,
    numbers: output.Numbers | None,
    batch: bool = False,
) -> None:
    """Check beforehand that vectors can go to a path, and that a JSON value may be printed as well.

    Args:
        keep, clobber, batch: as for :func:`output.check_output`.

    Raises:
        click.UsageError: both would be printed.
        SettingsError, OutputError, MissingExtra: as for :func:`output.check_output`.
    """
    if isinstance(path, Place):
        _check_folder(path, clobber=clobber)
        return
    if as_json and output.is_stdout(path):
        raise click.UsageError("--json and --output - both print to standard output: name a file, or omit --json")
    output.check_output(path, keep, clobber=clobber, numbers=numbers, batch=batch)


def _check_folder(folder: Place, *, clobber: bool) -> None:
    folder.check()  # first, because the extra s3 has all that its parts need
    import_module("embedctl.drain.part")  # raises MissingExtra without pyarrow
    if not clobber and MANIFEST in folder.names():
        raise OutputError(f"{folder.name} holds the parts of a job: choose another folder, or remove it")


def save(
    job: Job,
    path: Path | Place,
    progress: JobProgress,
    *,
    clobber: bool = True,
    file_format: str | None = None,
    one_file: bool = False,
    numbers: output.Numbers | None = None,
    requests: BatchCorpus | None = None,
) -> Sequence[Path | str]:
    """Write a job's vectors as they come, and show the progress of both. Vectors in the parts of a folder leave Redis.

    Args:
        clobber, file_format, one_file, numbers: as for :func:`output.fetch`.
        requests: the batch file that the job was made of.

    Raises:
        KeyboardInterrupt: says how to return to the job.
    """
    progress.begin_writing()
    if isinstance(path, Place):
        return _save_parts(job, path, progress, numbers)
    try:
        written = output.fetch(
            job,
            path,
            file_format=file_format,
            one_file=one_file,
            progress=progress.running,
            written=progress.written,
            clobber=clobber,
            numbers=numbers,
            requests=None if requests is None else requests.requests,
        )
        status = job.wait(progress=progress.running)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"job {job.id} goes on: embedctl fetch {job.id} -o {path}") from None
    if written:
        progress.say("Wrote " + ", ".join(map(str, written)))
    kept = status.options.get("keep")
    if kept and not output.holds_kept_fields(path) and not output.is_of_batch(status):
        progress.say(f"Not in {path}: the kept fields ({', '.join(kept)}). Fetch into a .jsonl or .parquet to get them")
    return written


def _save_parts(job: Job, folder: Place, progress: JobProgress, numbers: output.Numbers | None) -> list[str]:
    kind, ranges = (None, None) if numbers is None else (numbers.kind, numbers.ranges)
    try:
        written = job.drain(folder.name, progress.running, written=progress.written, output_type=kind, ranges=ranges)
    except KeyboardInterrupt:
        same = "" if kind is None else f" --output-type {kind}"
        raise KeyboardInterrupt(
            f"job {job.id} goes on: embedctl fetch {job.id} -o {folder.path_of('')} --drain{same}"
        ) from None
    progress.say(f"Wrote {len(written) - 1:,} parts and {MANIFEST} into {folder.name}")
    return written


def may_move(path: Path | Place | None) -> bool:
    """Whether a line of progress may move while vectors go to this path: not below records on the same terminal."""
    if (
        path is None
        or isinstance(path, Place)
        or not output.is_stdout(path)
        or sys.stdout is None
        or not sys.stdout.isatty()
    ):
        return True
    return not sys.stderr.isatty() or not os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())


def summary(status: JobStatus, continued_at: int | None = None) -> Summary:
    """What became of the records of a job, for :func:`report` and for JSON."""
    seconds = records_per_s = tokens_per_s = None
    retried = status.original_chunks is not None and status.chunks > status.original_chunks
    # The job's own times include the pause before it was continued, or before its failed records were retried.
    if continued_at is None and not retried and status.started_at is not None and status.ended_at is not None:
        seconds = (status.ended_at - status.started_at).total_seconds()
        records_per_s, tokens_per_s = average(status, status.ended_at)
    return Summary(
        status.done, status.dim, status.failed, status.truncated, seconds, records_per_s, tokens_per_s, continued_at
    )


def report(status: JobStatus, progress: JobProgress, *, failed_in: str | None = None) -> None:
    """Print a line that sums up an ended job, and one that says where its failed records are.

    Args:
        failed_in: the file that names them, of a job that is freed.
    """
    progress.say(_sentence(summary(status, progress.continued_at), progress), prose=True)
    if status.stopped_by is not None:
        left = status.records - status.done - status.failed
        progress.say(f"{left:,} records were not encoded: {_why_ended(status, is_freed=failed_in is not None)}")
    if status.failed and failed_in is not None:
        progress.say(f"The failed records are in {failed_in}")
    elif status.failed and status.state is not JobState.CANCELLED:
        progress.say(f"The failed records: embedctl errors {status.id}")


def _why_ended(status: JobStatus, *, is_freed: bool) -> str:
    if status.state is not JobState.STOPPED:
        return "the error budget (--max-errors) ended the job"
    mend = "" if is_freed else f". To continue it: embedctl submit CORPUS --resume {status.id}"
    return f"the job was stopped{mend}"


def failures_in(written: Sequence[Path | str]) -> str:
    """Of the files that :func:`save` wrote, the one that names the failed records."""
    if not written:
        return "standard output"
    place, _, last = str(written[-1]).rpartition("/")
    if last == MANIFEST:
        return f"the parts in {place}"
    return str(next((path for path in written if str(path).endswith(".errors.jsonl")), written[0]))


def _sentence(facts: Summary, progress: JobProgress) -> str:
    line = f"{facts.vectors:,} vectors"
    if facts.dimensions:
        line += f" of {facts.dimensions} dimensions"
    line += f"; {facts.failed:,} failed, {facts.truncated:,} truncated"
    if (writing := progress.writing) is not None and writing.alone:
        speed = f"; written in {writing.seconds:,.1f} s, {writing.average:,.0f} records/s"
        return line + (speed if writing.records else "")
    if facts.continued_at is not None:
        return f"{line}; this command continued it at {facts.continued_at:,} records"
    if facts.seconds is None:
        return line
    rates = [(facts.records_per_s, "records/s"), (facts.tokens_per_s, "tokens/s")]
    return ", ".join(
        [f"{line}; {facts.seconds:,.1f} s", *(f"{rate:,.0f} {unit}" for rate, unit in rates if rate is not None)]
    )


def exit_status(job: JobStatus) -> ExitStatus:
    """The exit status of a command that has waited for this job."""
    if job.state in (JobState.FAILED, JobState.STOPPED, JobState.CANCELLED):
        return ExitStatus.FAILURE
    return ExitStatus.SOME_FAILED if job.state is JobState.COMPLETED_WITH_ERRORS else ExitStatus.SUCCESS
