"""Waiting for jobs and writing their vectors, for several commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from embedctl import output
from embedctl.job import Job
from embedctl.store import JobState, JobStatus
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import ExitStatus


def wait_for(job: Job, progress: JobProgress, timeout: float | None = None) -> JobStatus:
    """Wait for a job under a progress bar.

    Raises:
        KeyboardInterrupt: says how to return to the job.
    """
    try:
        return job.wait(timeout, progress.running)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"job {job.id} goes on: embedctl wait {job.id}") from None


def save(job: Job, path: Path, progress: JobProgress) -> list[Path]:
    """Write a job's vectors as they come, under a progress bar.

    Raises:
        KeyboardInterrupt: says how to return to the job.
    """
    try:
        written = output.fetch(job, path, progress=progress.running)
        status = job.wait(progress=progress.running)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"job {job.id} goes on: embedctl fetch {job.id} -o {path}") from None
    if written:
        progress.say("Wrote " + ", ".join(map(str, written)))
    kept = status.options.get("keep")
    if kept and not output.holds_kept_fields(path):
        progress.say(f"Not in {path}: the kept fields ({', '.join(kept)}). Fetch into a .jsonl or .parquet to get them")
    return written


def bar_beside(path: Path | None) -> bool:
    """Whether a progress bar may be shown while vectors go to this path: not above records on the same terminal."""
    if path is None or not output.is_stdout(path) or sys.stdout is None or not sys.stdout.isatty():
        return True
    return not sys.stderr.isatty() or not os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())


def report(status: JobStatus, progress: JobProgress) -> None:
    """Print a line that sums up an ended job."""
    line = f"{status.done:,} vectors"
    if status.dim:
        line += f" of {status.dim} dimensions"
    line += f"; {status.failed:,} failed, {status.truncated:,} truncated"
    if progress.continued_at is not None:
        # The job's own times include the pause.
        line += f"; this command continued it at {progress.continued_at:,} records"
    elif status.started_at is not None and status.ended_at is not None:
        seconds = max(1e-3, (status.ended_at - status.started_at).total_seconds())
        line += f"; {seconds:,.1f} s, {status.done / seconds:,.0f} records/s, {status.tokens / seconds:,.0f} tokens/s"
    progress.say(line)


def exit_status(job: JobStatus) -> ExitStatus:
    """The exit status of a command that has waited for this job."""
    if job.state in (JobState.FAILED, JobState.CANCELLED):
        return ExitStatus.FAILURE
    return ExitStatus.SOME_FAILED if job.state is JobState.COMPLETED_WITH_ERRORS else ExitStatus.SUCCESS
