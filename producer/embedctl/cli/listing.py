"""The list of jobs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import click
from rich.console import Console

from embedctl.cli.json_forms import job_form, printed_array
from embedctl.cli.options import complete_class, complete_model, json_option, option
from embedctl.queueing.broker import Broker
from embedctl.store import JobState, JobStatus
from embedctl.terminal.columns import Column, Row, arrange, plain
from embedctl.terminal.drawing import duration, number
from embedctl.terminal.job_facts import state
from embedctl_config.loading import load_settings

_COLUMNS = (
    Column("JOB", 26),
    Column("STATE", 9),
    Column("AGE", 6, rank=2, right=True),
    Column("CLASS", 5, rank=3),
    Column("DONE", 4, right=True),
    Column("RECORDS", 6, right=True),
    Column("FAILED", 6, rank=1, right=True),
    Column("MODEL", 8, rank=1),
)
#: Jobs whose rows are made at once.
_PAGE = 200
#: Jobs that are left out are looked for among this many.
_LOOKED_AT = 1000


@click.command("list")
@option("--limit", type=click.IntRange(1), default=20, show_default=True, help="The maximum number of jobs to show.")
@click.option(
    "--state",
    "states",
    type=click.Choice([str(state) for state in JobState]),
    multiple=True,
    help="Only jobs in this state. Can be repeated.",
)
@click.option(
    "--model", "models", multiple=True, shell_complete=complete_model, help="Only jobs for this model. Can be repeated."
)
@click.option(
    "--class",
    "classes",
    multiple=True,
    shell_complete=complete_class,
    help="Only jobs of this hardware class. Can be repeated.",
)
@click.option("--tenant", "tenants", multiple=True, help="Only jobs of this tenant. Can be repeated.")
@json_option
def list_jobs(
    limit: int,
    states: tuple[str, ...],
    models: tuple[str, ...],
    classes: tuple[str, ...],
    tenants: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show the jobs in Redis, or those of the key's tenant in a gateway, newest first."""
    broker = Broker.shared(load_settings())
    filtered = bool(states or models or classes or tenants)
    # One more job than is shown tells whether there are more. Filters may leave out many.
    jobs = broker.jobs.newest() if filtered else broker.jobs.newest(limit + 1)

    def fits(job: JobStatus) -> bool:
        wanted = ((job.state, states), (job.model, models), (job.hardware, classes), (job.tenant, tenants))
        return all(not chosen or own in chosen for own, chosen in wanted)

    shown = islice(filter(fits, jobs), limit)
    if as_json:
        _print_json(broker, shown)
    else:
        _print_table(shown, broker.connection.about_now_ms() / 1000)
    if any(map(fits, islice(jobs, _LOOKED_AT))):
        click.echo(f"… and more; --limit {2 * limit} shows more", err=True)


def _print_json(broker: Broker, jobs: Iterator[JobStatus]) -> None:
    serving = cache(broker.workers.serving)
    with printed_array() as add:
        for job in jobs:
            is_known = broker.remote is not None  # the gateway knows its workers
            add(job_form(job if is_known else replace(job, live_workers=serving(job.hardware, job.model))))


def _print_table(jobs: Iterator[JobStatus], now_s: float) -> None:
    """Print the jobs page by page; the heads once Redis has answered."""
    console = Console(highlight=False)
    width = console.width if sys.stdout.isatty() else None
    heads = 0
    while True:
        page = [_row(job, now_s, width) for job in islice(jobs, _PAGE)]
        if not page and heads:
            return
        for line in arrange(_COLUMNS, page, width)[heads:]:
            console.print(line, soft_wrap=True)
        heads = 1


def _row(job: JobStatus, now_s: float, width: int | None) -> Row:
    # On a terminal, a job that failed in part is told by the number of failed records.
    shown = state(job) if width is None else "stalled" if job.stalled else job.state.partition("_")[0]
    finished = f"{100 * (job.done + job.failed) // job.records}%" if job.records else "–"
    open_end = "" if job.sealed or job.state.ended else "+"
    return [
        plain(job.id),
        plain(shown),
        plain(duration(max(0.0, now_s - job.created_at.timestamp()))),
        plain(job.hardware),
        plain(finished),
        plain(number(job.records, width) + open_end),
        plain(number(job.failed, width)),
        plain(job.model),
    ]
