"""Looking at jobs, and doing something about them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import click

from embedctl.broker import Broker
from embedctl.cli.options import job_argument, json_option, option, output_option, quiet_option
from embedctl.cli.results import exit_code, report, save, wait_for
from embedctl.job import Job
from embedctl.progress import JobProgress
from embedctl.routing import start_command
from embedctl.store import JobStatus, Suspect, WorkerRow
from embedctl_config.settings import load_settings


@click.command()
@job_argument
@json_option
def status(job_id: str, as_json: bool) -> None:
    """Show how a job stands."""
    job = Job.get(job_id)
    facts, workers, gone, suspects = job.status(), job.workers(), job.gone_workers(), job.suspects()
    if as_json:
        click.echo(
            _to_json(
                facts,
                workers=[{**asdict(worker), "activity": worker.activity} for worker in workers],
                gone=[asdict(each) for each in gone],
                suspects=[asdict(each) for each in suspects],
            )
        )
        return
    lines = _facts(facts, workers)
    if not facts.state.ended:
        lines += [("gone", f"{each.worker.name}, {each.seconds:.0f} s ago: {each.how}") for each in gone]
        lines += [line for suspect in suspects for line in _history(suspect)]
    click.echo("\n".join(f"{name:<10} {value}" for name, value in lines))


@click.command("list")
@option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Most jobs to show.")
@json_option
def list_jobs(limit: int, as_json: bool) -> None:
    """Show the jobs that Redis knows, the newest first."""
    broker = Broker.connect(load_settings())
    newest = islice(broker.jobs.newest(), limit)
    jobs = (replace(job, live_workers=broker.workers.count(job.queue)) for job in newest)
    if as_json:
        for job in jobs:
            click.echo(_to_json(job))
        return
    row = "{:<26}  {:<21}  {:>11}  {:>11}  {:>7}  {}"
    click.echo(row.format("JOB", "STATE", "RECORDS", "DONE", "FAILED", "MODEL"))
    for job in jobs:
        state = f"{job.state}{' (stalled)' if job.stalled else ''}"
        click.echo(row.format(job.id, state, f"{job.records:,}", f"{job.done:,}", f"{job.failed:,}", job.model))


@click.command()
@job_argument
@option("--timeout", type=float, help="Seconds to wait at most; then exit with 124.")
@quiet_option
@click.pass_context
def wait(ctx: click.Context, /, job_id: str, timeout: float | None, quiet: bool) -> None:
    """Wait until a job has ended."""
    job = Job.get(job_id)
    with JobProgress(quiet=quiet) as progress:
        ended = wait_for(job, progress, timeout)
    report(ended, progress)
    ctx.exit(exit_code(ended))


@click.command()
@job_argument
@output_option(required=True)
@quiet_option
@click.pass_context
def fetch(ctx: click.Context, /, job_id: str, output: Path, quiet: bool) -> None:
    """Write a job's vectors, waiting for those that are not there yet.

    In .npy a failed record is a row of NaN, and ids and errors stand in files beside it; .jsonl and .parquet hold
    everything. A fetch that was interrupted is taken up by the next one to the same file.
    """
    job = Job.get(job_id)
    with JobProgress(quiet=quiet) as progress:
        save(job, output, progress)
    ctx.exit(exit_code(job.status()))


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
            click.echo(f"record {name}: {error.code}: {error.message}")


@click.command()
@job_argument
def retry(job_id: str) -> None:
    """Queue the failed records of an ended job once more."""
    records = Job.get(job_id).retry_failed()
    click.echo(f"{records:,} records queued again", err=True)


@click.command()
@job_argument
def discard(job_id: str) -> None:
    """Free a job and all that Redis stores for it, now. What was not fetched is gone."""
    Job.get(job_id).discard()
    click.echo(f"{job_id}: discarded", err=True)


@click.command()
@job_argument
def cancel(job_id: str) -> None:
    """End a job now and free what it stored. A job that has ended stays as it is."""
    click.echo(f"{job_id}: {Job.get(job_id).cancel().state}", err=True)


def _engines(model: str, workers: Sequence[WorkerRow]) -> list[str]:
    """What executes a model, and how fast all workers that use it were so far."""
    rates: dict[str, float] = {}
    for worker in workers:
        served = worker.models.get(model)
        if served is not None and served.engine:
            rates[served.engine] = rates.get(served.engine, 0.0) + served.tokens_per_s
    return [f"{engine}; {rate:,.0f} tokens/s" if rate else engine for engine, rate in sorted(rates.items())]


def _facts(job: JobStatus, workers: Sequence[WorkerRow]) -> list[tuple[str, str]]:
    """What `status` shows, name by name; leaves out what has nothing to say."""
    activities = Counter(worker.activity for worker in workers)
    alive = f"{len(workers)} live"
    if activities:
        alive += f": {', '.join(f'{count} {activity}' for activity, count in sorted(activities.items()))}"
    elif not job.state.ended:
        alive += f"; start one: {start_command(job.hardware, job.model)}"
    state = f"{job.state}{' (stalled)' if job.stalled else ''}"
    if job.stopped_by is not None:
        state += f" (ended by {job.stopped_by})"
    facts = [
        ("job", job.id),
        ("state", state),
        ("model", job.model),
        ("class", f"{job.hardware} ({job.precision})"),
        ("workers", alive),
        *(("engine", line) for line in _engines(job.model, workers)),
        *(
            ("hung", f"{worker.name}: no batch finished for {worker.quiet_s:.0f} s")
            for worker in workers
            if worker.activity == "hung"
        ),
        *(
            ("bounds", f"{worker.name} is held to {worker.bounds} in place of {worker.precision}'s own")
            for worker in workers
            if worker.bounds
        ),
        ("records", f"{job.records:,}{'' if job.sealed else ' so far'}"),
        ("done", f"{job.done:,}"),
        ("failed", f"{job.failed:,}"),
        ("truncated", f"{job.truncated:,}"),
        ("chunks", f"{job.chunks_done:,} of {job.chunks:,}"),
        (
            "repeated",
            f"leases lapsed: {job.lapsed:,}, of workers gone: {job.deaths:,}, late results: {job.refused:,}"
            if job.lapsed or job.refused
            else "",
        ),
        ("created", _when(job.created_at)),
        ("started", _when(job.started_at)),
        ("ended", _when(job.ended_at)),
        ("kept", f"{job.expires_in.total_seconds() / 3600:,.1f} hours more"),
    ]
    if job.mismatch:
        facts.append(("mismatch", f"{job.mismatch} was refused: {job.pinned_by} serves {job.model_fingerprint}"))
    if job.trouble and not job.state.ended:
        facts.append(("trouble", job.trouble))
    if job.lost_chunks:
        facts.append(("lost", f"lost by the broker: chunks {job.lost_chunks[0]} to {job.lost_chunks[1]}"))
    return [(name, value) for name, value in facts if value]


def _when(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else ""


def _history(suspect: Suspect) -> Iterator[tuple[str, str]]:
    """What is known of a chunk whose owners died, a line for it and one for each death."""
    so_far = f"rows given up: {', '.join(map(str, suspect.given_up))}" if suspect.given_up else "no row named yet"
    yield "stuck" if suspect.stuck else "suspect", f"chunk {suspect.chunk}: encoded alone, record by record; {so_far}"
    for death in suspect.deaths:
        at_row = "" if death.row is None else f" at row {death.row}"
        yield "", f"{_when(death.at)}: {death.worker} died{at_row}"


def _to_json(job: JobStatus, **more: Sequence[Any]) -> str:
    return json.dumps({**asdict(job), "stalled": job.stalled, **more}, default=_as_json)


def _as_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} has no JSON form")
