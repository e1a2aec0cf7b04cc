"""Queueing a corpus for the workers of a Redis."""

from __future__ import annotations

from typing import Any

import click

from embedctl.cli.job_command import JobCommand, job_options
from embedctl.cli.json_forms import result_json
from embedctl.cli.options import SectionedCommand, complete_job, option, section
from embedctl.cli.results import exit_status, report, report_sum, summary, wait_for
from embedctl.cli.update import brought_up_to_date, to_encode
from embedctl.destinations.jsonl import is_stdout
from embedctl.destinations.loop import Delivered
from embedctl.jobs.estimate import estimate
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.queueing.routing import no_worker_for
from embedctl.terminal.progress import JobProgress
from embedctl_config import keys
from embedctl_config.errors import ExitStatus
from embedctl_config.loading import load_settings
from embedctl_config.printable import printable
from embedctl_config.settings import Settings

_job_options = section(
    "Job",
    option("--ttl", "ttl_s", type=float, help="Seconds to keep the job after its end. Default: the setting."),
    option(
        "--resume",
        metavar="KEY|JOB",
        shell_complete=complete_job,
        help="Your own key for this job: submitting again with the same key finds or resumes the job. Or the id, in "
        "full, of a job whose submission was interrupted, to resume that. Needs the same corpus.",
    ),
    option(
        "--drain",
        is_flag=True,
        help="Make a job that is drained from its start: it pauses while Redis holds too many of its vectors, until "
        "`embedctl fetch JOB -o DIR/` takes them. With -o URL, they leave Redis as the database has them.",
    ),
    option("--wait", is_flag=True, help="Wait until the job has ended."),
)


@click.command(cls=SectionedCommand)
@job_options(
    _job_options,
    hardware="The hardware class; auto: the fastest class with live workers. Default: the setting.",
    dry_run="Queue nothing; print an estimate of the job's size and duration.",
)
@click.pass_context
def submit(ctx: click.Context, /, *, ttl_s: float | None, resume: str | None, wait: bool, **given: Any) -> None:
    """Queue CORPUS and print the job's id.

    CORPUS is one or more of: a .jsonl, .json, .csv, .tsv, .txt or .parquet file, compressed or not;
    a folder of such files; a pattern in quotes; - for standard input, which is read as jsonl unless --format says
    otherwise. An OpenAI batch file is told by its first line. With --output, the vectors are written while
    workers encode. If that is interrupted, `embedctl fetch` resumes it.
    """
    settings = load_settings()
    is_job = resume is not None and keys.is_job_id(resume)
    job_id, key = (resume, None) if is_job else (None, resume)
    command = JobCommand.of(settings, ttl=ttl_s, resume=job_id, idempotency_key=key, **given)
    command.check()
    broker = Broker.shared(settings)
    command.check_owner(broker)
    command = command.checked()
    if command.dry_run:
        choice = command.choice
        records = to_encode(command, broker)
        command.print_estimate(estimate(broker, records, choice.options, at_hand=choice.corpus.rereadable))
        return
    with command.progress() as progress:
        synced = brought_up_to_date(broker, command, progress, lambda job: progress.say(f"job {job.id}"))
        if synced is None:
            job = command.submit(broker, progress)
            saved = _followed(job, command, broker, progress, wait=wait)
    if synced is not None:
        ctx.exit(synced.tell(progress, as_json=command.as_json))
    ctx.exit(_report(job, command, settings, progress, saved))


def _followed(job: Job, command: JobCommand, broker: Broker, progress: JobProgress, *, wait: bool) -> Delivered:
    """Print the job's id, and wait for what the command waits for; returns what was written."""
    destination = command.destination
    if command.as_json:
        progress.say(f"job {job.id}")
    else:
        with progress.above():
            click.echo(job.id, err=is_stdout(destination.path))  # the vectors have standard output to themselves
    if destination.is_given:
        return destination.save(job, broker, progress, requests=command.choice.requests(destination.path))
    if wait:
        wait_for(job, progress)
    return Delivered()


def _report(job: Job, command: JobCommand, settings: Settings, progress: JobProgress, saved: Delivered) -> ExitStatus:
    status, options = job.status(), command.choice.options
    # The choice of a class by `auto` has said so already.
    chosen = options.resume is None and (options.hardware or settings.hardware) == "auto"
    if not status.state.ended and not status.live_workers and not chosen:
        click.echo(printable(no_worker_for(status)), err=True)
    if status.state.ended:
        report(status, progress)
    report_sum(command.choice.tally, status, progress, saved.refused)
    if command.as_json:
        click.echo(result_json(status, summary(status, progress.resumed_at), saved))
    return exit_status(status, saved.refused)
