"""Waiting for jobs and what became of them, for several commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embedctl.cli.corpora import Tally
from embedctl.destinations.place import MANIFEST
from embedctl.jobs.job import Job
from embedctl.store import JobState, JobStatus
from embedctl.terminal.progress import JobProgress
from embedctl.waiting.overview import average
from embedctl.waiting.results import FailedRecord
from embedctl_config.errors import ExitStatus, JobDrained, JobError, JobHeld, JobNotFound, JobStalled
from embedctl_config.record_ids import as_text


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of a job's records.

    Attributes:
        dimensions: of a vector; None before there is one.
        seconds: from the job's start to its end, while it was encoded; None if it has not ended, or paused in
            between.
        records_per_s, tokens_per_s: the average over that time.
        resumed_at: records that were done before the command resumed the job; None if it resumed none.
    """

    vectors: int
    dimensions: int | None
    failed: int
    truncated: int
    seconds: float | None
    records_per_s: float | None
    tokens_per_s: float | None
    resumed_at: int | None


#: After these, a command does not free its job: nothing is left of it, the same command resumes, or another process
#: drains it, or has drained it to where this one can't read.
NOT_TO_FREE = (JobNotFound, JobStalled, JobHeld, JobDrained)


def wait_for(job: Job, progress: JobProgress, timeout: float | None = None) -> JobStatus:
    """Wait for a job, and show its progress. A KeyboardInterrupt says how to return to the job."""
    try:
        return job.wait(timeout, progress.running)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"job {job.id} goes on: embedctl wait {job.id}") from None


def summary(status: JobStatus, resumed_at: int | None = None) -> Summary:
    """What became of the records of a job, for :func:`report` and for JSON."""
    seconds = records_per_s = tokens_per_s = None
    retried = status.original_chunks is not None and status.chunks > status.original_chunks
    # The job's own times include the pause before it was resumed, or before its failed records were retried.
    if resumed_at is None and not retried and status.started_at is not None and status.ended_at is not None:
        seconds = (status.ended_at - status.started_at).total_seconds()
        records_per_s, tokens_per_s = average(status, status.ended_at)
    return Summary(
        status.done, status.dim, status.failed, status.truncated, seconds, records_per_s, tokens_per_s, resumed_at
    )


def report(status: JobStatus, progress: JobProgress, *, failed_in: str | None = None) -> None:
    """Print a line that sums up an ended job, and one that says where its failed records are: if it is freed, in
    `failed_in`."""
    progress.say(_sentence(summary(status, progress.resumed_at), progress), prose=True)
    if status.stopped_by is not None:
        left = status.records - status.done - status.failed
        progress.say(f"{left:,} records were not encoded: {why_ended(status, is_freed=failed_in is not None)}")
    if status.failed and failed_in is not None:
        progress.say(f"The failed records are in {failed_in}")
    elif status.failed and status.state is not JobState.CANCELLED:
        if not status.done and status.drained_to is None:  # usually all for one reason, which says what to do
            first = next(Job.get(status.id).iter_errors(), None)
            progress.say("No record could be encoded" + ("" if first is None else f". The first: {failed_line(first)}"))
        progress.say(f"The failed records: embedctl errors {status.id}")


def report_sum(tally: Tally, status: JobStatus, progress: JobProgress, refused: int = 0) -> None:
    """Print what became of all that was read, as a sum; nothing, if the job had ended before the corpus was read to its
    end. A database did not take `refused` of the records. JobError: the sum does not come out."""
    if not tally.is_whole:
        return
    if tally.made != status.records:
        raise JobError(f"{tally.made:,} records were read, and job {status.id} has {status.records:,}: report this")
    left = status.records - status.done - status.failed
    became = [f"{status.done - refused:,} vectors", f"{status.failed:,} failed"] if status.state.ended else []
    became += [f"{refused:,} refused"] if refused else []
    became += [f"{left:,} {'not encoded' if became else 'queued'}"] if left else []
    bad = [tally.bad_lines] if tally.lines else []
    read = f"{tally.records + tally.lines:,} read = "
    if tally.made != tally.records:
        read += f"{' + '.join([f'{tally.records:,} records', *bad])}; {tally.made:,} pieces = "
        bad = []
    progress.say(read + " + ".join([*became, *bad]))


def why_ended(status: JobStatus, *, is_freed: bool) -> str:
    """Why records were not encoded, and how to go on, unless the job is freed."""
    if status.state is not JobState.STOPPED:
        return "the error budget (--max-errors) ended the job"
    mend = "" if is_freed else f". To resume it: embedctl submit CORPUS --resume {status.id}"
    return f"the job was stopped{mend}"


def failures_in(written: Sequence[Path | str]) -> str:
    """Of the files that were written, the one that names the failed records."""
    if not written:
        return "standard output"
    place, _, last = str(written[-1]).rpartition("/")
    if last == MANIFEST:
        return f"the parts in {place}"
    return str(next((path for path in written if str(path).endswith(".errors.jsonl")), written[0]))


def failed_line(error: FailedRecord) -> str:
    name = "" if error.id is None else f" ({as_text(error.id)})"
    return f"record {error.position}{name}: {error.code}: {error.message}"


def _sentence(facts: Summary, progress: JobProgress) -> str:
    line = f"{facts.vectors:,} vectors"
    if facts.dimensions:
        line += f" of {facts.dimensions} dimensions"
    line += f"; {facts.failed:,} failed, {facts.truncated:,} truncated"
    if (writing := progress.writing) is not None and writing.alone:
        speed = f"; written in {writing.seconds:,.1f} s, {writing.average:,.0f} records/s"
        return line + (speed if writing.records else "")
    if facts.resumed_at is not None:
        return f"{line}; this command resumed it at {facts.resumed_at:,} records"
    if facts.seconds is None:
        return line
    rates = [(facts.records_per_s, "records/s"), (facts.tokens_per_s, "tokens/s")]
    return ", ".join(
        [f"{line}; {facts.seconds:,.1f} s", *(f"{rate:,.0f} {unit}" for rate, unit in rates if rate is not None)]
    )


def exit_status(job: JobStatus, refused: int = 0) -> ExitStatus:
    """The exit status of a command that has waited for this job. A database did not take `refused` of its records."""
    if job.state in (JobState.FAILED, JobState.STOPPED, JobState.CANCELLED):
        return ExitStatus.FAILURE
    return ExitStatus.SOME_FAILED if refused or job.state is JobState.COMPLETED_WITH_ERRORS else ExitStatus.SUCCESS
