"""Commands that list, await, fetch, retry, cancel and free jobs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import click

from embedctl.broker import Broker
from embedctl.cli.json_forms import job_json
from embedctl.cli.options import job_argument, json_option, option, output_option, quiet_option
from embedctl.cli.results import bar_beside, exit_status, report, save, wait_for
from embedctl.job import Job
from embedctl.terminal.job_facts import state
from embedctl.terminal.progress import JobProgress
from embedctl_config.printable import printable
from embedctl_config.settings import load_settings


@click.command("list")
@option("--limit", type=click.IntRange(1), default=20, show_default=True, help="The maximum number of jobs to show.")
@json_option
def list_jobs(limit: int, as_json: bool) -> None:
    """Show the jobs in Redis, newest first."""
    broker = Broker.shared(load_settings())
    newest = islice(broker.jobs.newest(), limit)
    jobs = (replace(job, live_workers=broker.workers.count(job.queue)) for job in newest)
    if as_json:
        for job in jobs:
            click.echo(job_json(job))
        return
    row = "{:<26}  {:<21}  {:>11}  {:>11}  {:>7}  {}"
    click.echo(row.format("JOB", "STATE", "RECORDS", "DONE", "FAILED", "MODEL"))
    for job in jobs:
        shown = row.format(job.id, state(job), f"{job.records:,}", f"{job.done:,}", f"{job.failed:,}", job.model)
        click.echo(printable(shown))


@click.command()
@job_argument
@option("--timeout", type=float, help="Stop waiting after this many seconds and exit with 124.")
@quiet_option
@click.pass_context
def wait(ctx: click.Context, /, job_id: str, timeout: float | None, quiet: bool) -> None:
    """Wait until a job has ended."""
    job = Job.get(job_id)
    with JobProgress(quiet=quiet) as progress:
        ended = wait_for(job, progress, timeout)
    report(ended, progress)
    ctx.exit(exit_status(ended))


@click.command()
@job_argument
@output_option(required=True)
@quiet_option
@click.pass_context
def fetch(ctx: click.Context, /, job_id: str, output: Path, quiet: bool) -> None:
    """Write a job's vectors, and wait for any that are not ready yet.

    In .npy, a failed record is a row of NaN; ids and errors go to separate files next to the .npy file. A .jsonl or
    .parquet file holds everything. To continue an interrupted fetch, run it again with the same file.
    """
    job = Job.get(job_id)
    with JobProgress(quiet=quiet, bar=bar_beside(output)) as progress:
        save(job, output, progress)
    ctx.exit(exit_status(job.status()))


@click.command()
@job_argument
@json_option
def errors(job_id: str, as_json: bool) -> None:
    """List the records of an ended job that have no vector."""
    for error in Job.get(job_id).iter_errors():
        if as_json:
            click.echo(json.dumps(asdict(error), ensure_ascii=True))
        else:
            name = f"{error.position}" + ("" if error.id is None else f" ({error.id})")
            click.echo(printable(f"record {name}: {error.code}: {error.message}"))


@click.command()
@job_argument
def retry(job_id: str) -> None:
    """Queue the failed records of an ended job again."""
    records = Job.get(job_id).retry_failed()
    click.echo(f"{records:,} records queued again", err=True)


@click.command()
@job_argument
def discard(job_id: str) -> None:
    """Delete a job and all its data from Redis now. Vectors that you have not fetched are lost."""
    Job.get(job_id).discard()
    click.echo(printable(f"{job_id}: discarded"), err=True)


@click.command()
@job_argument
def cancel(job_id: str) -> None:
    """End a job now and free its data in Redis. A job that has already ended is left unchanged."""
    click.echo(printable(f"{job_id}: {Job.get(job_id).cancel().state}"), err=True)
