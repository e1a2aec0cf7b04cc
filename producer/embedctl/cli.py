"""The command line: parse, call the library, print. Job ids and data go to standard output, all else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

from embedctl import corpus, enqueue
from embedctl.broker import Broker
from embedctl.job import Job
from embedctl.output import Written, write_npy
from embedctl.progress import JobProgress
from embedctl.routing import start_command
from embedctl.store import JobState, JobStatus
from embedctl_config import __version__
from embedctl_config.errors import EmbedctlError
from embedctl_config.hardware import PRECISIONS
from embedctl_config.settings import Settings, load_settings

_PARTIAL = 3
_INTERRUPTED = 130

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns our errors into one line and their exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EmbedctlError as error:
            click.echo(f"embedctl: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("embedctl: interrupted", err=True)
            sys.exit(_INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="embedctl")
def main() -> None:
    """Turn a corpus into embedding vectors, and lose nothing.

    On one machine: embedctl run corpus.jsonl -o vectors.npy

    On many: set EMBEDCTL_REDIS_URL, start `embedctl worker` on each, then `embedctl submit corpus.jsonl`.
    """


def _corpus_options(command: F) -> F:
    options = [
        click.argument("corpus", type=click.Path(allow_dash=True)),
        click.option("--format", type=click.Choice(corpus.FORMATS), help="The corpus's format. Default: by its name."),
        click.option("--text-field", default="text", show_default=True, help="The field that holds a record's text."),
        click.option("--id-field", default="id", show_default=True, help="The field that holds a record's id."),
        click.option("--model", help="The model, by the name under which workers serve it."),
        click.option("--precision", type=click.Choice(PRECISIONS), help="What the vectors must hold to."),
        click.option("--prompt", help="Put before every text. Default: the model's own."),
        click.option(
            "--truncation",
            type=click.Choice(["truncate", "error"]),
            default="truncate",
            show_default=True,
            help="Texts longer than the model takes: encode their first tokens, or fail them.",
        ),
        click.option(
            "--normalize/--no-normalize", default=True, show_default=True, help="Make vectors of unit length."
        ),
        click.option("--chunk-size", type=click.IntRange(1), help="Most records in a chunk."),
        click.option("--quiet", "-q", is_flag=True, help="No progress."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@_corpus_options
@click.option("--class", "hardware", help="The hardware class, or auto for the fastest alive.")
@click.option("--ttl", type=float, help="Seconds to keep the job after its last progress.")
@click.option("--idempotency-key", help="Submitting again with this key takes up or finds the same job.")
@click.option("--wait", is_flag=True, help="Wait until the job has ended.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the vectors here; implies --wait.")
@click.pass_context
def submit(ctx: click.Context, /, wait: bool, output: Path | None, quiet: bool, **options: Any) -> None:
    """Queue CORPUS (.jsonl, .txt or - for standard input) and print the job's id."""
    settings = load_settings()
    broker = Broker.connect(settings)
    with JobProgress(quiet=quiet) as progress:
        job = _submit(broker, settings, progress, options)
        click.echo(job.id)
        if wait or output is not None:
            _wait(job, progress, f"it goes on; embedctl status {job.id} shows how it stands")
    if output is not None:
        _report(write_npy(job, output))
    status = job.status()
    if not status.state.ended and not status.live_workers:
        click.echo(
            f"No live worker serves {status.model} on {status.hardware}. Start one: "
            f"{start_command(status.hardware, status.model)}",
            err=True,
        )
    ctx.exit(_exit_code(status))


@main.command()
@_corpus_options
@click.option("--class", "hardware", default="cpu", show_default=True, help="The hardware class.")
@click.option("--cpus", help="CPUs for the worker, such as 0-3. Default: all.")
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="Write the vectors here.")
@click.pass_context
def run(ctx: click.Context, /, output: Path, cpus: str | None, quiet: bool, **options: Any) -> None:
    """Embed CORPUS on this machine alone: start what it needs, wait, write the vectors, stop what it started.

    With EMBEDCTL_REDIS_URL set, that Redis is used instead of a private one.
    """
    from embedctl import local

    settings = load_settings()
    options = {**options, "ttl": None, "idempotency_key": _run_key(options, output)}
    model = options["model"] or settings.model
    log_file = local.state_folder(settings) / "logs" / f"worker-{os.getpid()}.log"
    redis = nullcontext(settings) if settings.redis_url else local.private_redis(settings)
    with redis as ours:
        broker = Broker.connect(ours)
        click.echo(f"Loading {model} (worker's log: {log_file})", err=True)
        with local.local_worker(ours, hardware=options["hardware"], model=model, cpus=cpus, log_file=log_file):
            with JobProgress(quiet=quiet) as progress:
                job = _submit(broker, ours, progress, options)
                status = _wait(job, progress, "run the same command again, and it goes on where it stopped")
            try:
                _report(write_npy(job, output))
            finally:
                job.discard()
        broker.close()
    log_file.unlink()
    click.echo(_summary(status), err=True)
    ctx.exit(_exit_code(status))


@main.command()
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(job_id: str, as_json: bool) -> None:
    """Show how a job stands."""
    job = Job.get(job_id).status()
    if as_json:
        click.echo(json.dumps({**asdict(job), "stalled": job.stalled}, default=_as_json))
    else:
        click.echo("\n".join(f"{name:<12} {value}" for name, value in _facts(job)))


@main.command()
@click.argument("job_id", metavar="JOB")
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="Write the vectors here.")
@click.pass_context
def fetch(ctx: click.Context, /, job_id: str, output: Path) -> None:
    """Write an ended job's vectors to a .npy file, its ids and errors beside it.

    A failed record is a row of NaN.
    """
    job = Job.get(job_id)
    _report(write_npy(job, output))
    ctx.exit(_exit_code(job.status()))


@main.command()
@click.argument("job_id", metavar="JOB")
def cancel(job_id: str) -> None:
    """End a job now and free what it stored. A job that has ended stays as it is."""
    state = Job.get(job_id).cancel().state
    click.echo(f"{job_id}: {state}", err=True)


@main.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Encode chunks on this machine until stopped; see `embedctl worker --help`."""
    # A process of its own image: nothing that this command imported may come before the worker is pinned.
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_workers", *arguments])  # noqa: S606


def _submit(broker: Broker, settings: Settings, progress: JobProgress, options: dict[str, Any]) -> Job:
    records = corpus.read_corpus(
        options["corpus"],
        file_format=options["format"],
        text_field=options["text_field"],
        id_field=options["id_field"],
        max_bytes=settings.max_text_bytes,
    )
    chosen = enqueue.JobOptions(
        model=options["model"],
        hardware=options["hardware"],
        precision=options["precision"],
        prompt=options["prompt"],
        truncation=options["truncation"],
        normalize=options["normalize"],
        chunk_size=options["chunk_size"],
        ttl=options["ttl"],
        idempotency_key=options["idempotency_key"],
    )
    return enqueue.submit(broker, records, chosen, progress.submitting)


def _wait(job: Job, progress: JobProgress, how_to_return: str) -> JobStatus:
    try:
        return job.wait(progress=progress.running)
    except KeyboardInterrupt:
        click.echo(f"Interrupted while waiting for job {job.id}: {how_to_return}.", err=True)
        sys.exit(_INTERRUPTED)


def _run_key(options: dict[str, Any], output: Path) -> str | None:
    """Names this run: the same command after a crash goes on where it stopped; a changed file is another run."""
    path = Path(options["corpus"])
    if options["corpus"] == "-" or not path.is_file():
        return None
    facts = path.stat()
    return json.dumps([str(path.resolve()), facts.st_mtime_ns, facts.st_size, str(output.resolve()), options])


def _report(written: Written) -> None:
    files = [written.vectors, written.ids, written.errors, written.truncations]
    click.echo("Wrote " + ", ".join(str(path) for path in files if path is not None), err=True)


def _exit_code(job: JobStatus) -> int:
    if job.state in (JobState.FAILED, JobState.CANCELLED):
        return 1
    return _PARTIAL if job.state is JobState.COMPLETED_WITH_ERRORS else 0


def _summary(job: JobStatus) -> str:
    summary = f"{job.done:,} vectors of {job.dim} dimensions; {job.failed:,} failed, {job.truncated:,} truncated"
    if job.started_at is None or job.ended_at is None:
        return summary
    seconds = max(1e-3, (job.ended_at - job.started_at).total_seconds())
    return f"{summary}; {seconds:.1f} s, {job.done / seconds:,.0f} records/s, {job.tokens / seconds:,.0f} tokens/s"


def _facts(job: JobStatus) -> list[tuple[str, str]]:
    """What `status` shows, name by name; leaves out what has nothing to say."""
    workers = f"{job.live_workers} live"
    if not job.live_workers and not job.state.ended:
        workers += f"; start one: {start_command(job.hardware, job.model)}"
    facts = [
        ("job", job.id),
        ("state", f"{job.state}{' (stalled)' if job.stalled else ''}"),
        ("model", job.model),
        ("class", f"{job.hardware} ({job.precision})"),
        ("workers", workers),
        ("records", f"{job.records:,}{'' if job.sealed else ' so far'}"),
        ("done", f"{job.done:,}"),
        ("failed", f"{job.failed:,}"),
        ("truncated", f"{job.truncated:,}"),
        (
            "chunks",
            f"{job.chunks_done:,} of {job.chunks:,}; {job.claims:,} claims, {job.lapsed:,} leases lapsed",
        ),
        ("created", _when(job.created_at)),
        ("started", _when(job.started_at)),
        ("ended", _when(job.ended_at)),
        ("kept", f"{job.expires_in.total_seconds() / 3600:,.1f} hours more"),
    ]
    if job.mismatch:
        facts.append(("mismatch", f"{job.mismatch} was refused: {job.pinned_by} serves {job.model_fingerprint}"))
    if job.lost_chunks:
        facts.append(("lost", f"lost by the broker: chunks {job.lost_chunks[0]} to {job.lost_chunks[1]}"))
    return [(name, value) for name, value in facts if value]


def _when(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else ""


def _as_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} has no JSON form")
