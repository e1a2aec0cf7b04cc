"""Commands that await and fetch one job, and list its failed records."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from embedctl.cli.corpora import requests_in
from embedctl.cli.destination import DatabaseUrl, Destination, destination_options
from embedctl.cli.json_forms import printed_array, result_json
from embedctl.cli.options import job_argument, json_option, option, quiet_option
from embedctl.cli.results import exit_status, failed_line, report, summary, wait_for
from embedctl.corpus.batch import BATCH_FORMAT
from embedctl.destinations.formats import FORMATS
from embedctl.destinations.ids import Duplicates
from embedctl.destinations.place import Place
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.terminal.progress import JobProgress
from embedctl_config.loading import load_settings
from embedctl_config.printable import printable
from embedctl_config.record_ids import to_json


@click.command()
@job_argument
@option("--timeout", type=float, help="Stop waiting after this many seconds and exit with 124.")
@quiet_option
@json_option
@click.pass_context
def wait(ctx: click.Context, /, job_id: str, timeout: float | None, quiet: bool, as_json: bool) -> None:
    """Wait until a job has ended."""
    job = Job.get(job_id)
    with JobProgress(quiet=quiet) as progress:
        progress.now_ms = Broker.shared(load_settings()).connection.about_now_ms
        ended = wait_for(job, progress, timeout)
    report(ended, progress)
    if as_json:
        click.echo(result_json(ended, summary(ended)))
    ctx.exit(exit_status(ended))


@click.command()
@job_argument
@destination_options(
    Duplicates,
    "For databases: which record is written if several have the same id; position makes each id of the job and the "
    "record's position, as JOB:POSITION. Default: error, before anything is written.",
)
# Without a variable: EMBEDCTL_FORMAT is the format of a corpus.
@click.option(
    "--format",
    "file_format",
    type=click.Choice([*FORMATS, BATCH_FORMAT]),
    help=f"The format of the file. Default: that of its suffix; {BATCH_FORMAT} for .jsonl if the job was made of a "
    "batch file.",
)
# Without a variable, like that of `run`.
@click.option(
    "--input-file",
    "-i",
    "input_files",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    help="The batch file that the job was made of: its requests that were not run, because the job was stopped, was "
    "cancelled or expired, then have a line of their own.",
)
@quiet_option
@json_option
@click.pass_context
def fetch(
    ctx: click.Context,
    /,
    *,
    job_id: str,
    file_format: str | None,
    input_files: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Write a job's vectors, and wait for any that are not ready yet.

    In .npy, a failed record is a row of NaN; ids and errors go to separate files next to the .npy file. A .jsonl or
    .parquet file holds everything. After an interrupted fetch, run it again.

    Into a folder DIR/, vectors move, also while the job runs: a part that is durable there is removed from Redis, and
    the job pauses while Redis holds too many vectors. Later, they are fetched from the parts, where this machine has
    them.

    Into a table of a database, each record that has a vector goes under its id.
    """
    settings = load_settings()
    if given["output"] is None:
        raise click.UsageError("Missing option '--output' / '-o'.")
    if (file_format or input_files) and isinstance(given["output"], Place | DatabaseUrl):
        raise click.UsageError("--format and --input-file are for files: omit them, or name one with -o.")
    destination = Destination.taken_from(given, settings)
    destination.check(as_json=as_json)
    job = Job.get(job_id)
    requests = requests_in(settings, input_files) if input_files else None
    with JobProgress(quiet=quiet, moving=destination.may_move) as progress:
        broker = Broker.shared(settings)
        progress.now_ms = broker.connection.about_now_ms
        saved = destination.save(job, broker, progress, file_format=file_format, requests=requests)
    ended = job.status()
    report(ended, progress)
    if as_json:
        click.echo(result_json(ended, summary(ended), saved))
    ctx.exit(exit_status(ended, saved.refused))


@click.command()
@job_argument
@json_option
def errors(job_id: str, as_json: bool) -> None:
    """List the records of an ended job that have no vector."""
    found = Job.get(job_id).iter_errors()
    if as_json:
        with printed_array() as add:
            for error in found:
                add({**asdict(error), "id": to_json(error.id)})
        return
    for error in found:
        click.echo(printable(failed_line(error)))
