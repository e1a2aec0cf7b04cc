"""A whole job on this machine."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from embedctl.cli.delivery import list_failed
from embedctl.cli.job_command import JobCommand, job_options
from embedctl.cli.json_forms import result_json
from embedctl.cli.options import SectionedCommand, option, section
from embedctl.cli.results import NOT_TO_FREE, exit_status, failures_in, report, report_sum, summary
from embedctl.cli.update import brought_up_to_date, to_encode
from embedctl.corpus.batch import BatchCorpus
from embedctl.corpus.reading import Corpus
from embedctl.destinations.jsonl import is_stdout
from embedctl.destinations.loop import Delivered
from embedctl.destinations.place import Place
from embedctl.jobs.estimate import local_estimate
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.queueing.routing import local_class
from embedctl.store import JobStatus
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import JobError, JobLost, JobNotFound
from embedctl_config.hardware import POOLINGS
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings

_worker_options = section(
    "Worker",
    option(
        "--pooling",
        type=click.Choice(POOLINGS),
        help="How a model without modules of its own makes one vector of a text, as its authors say, if this command "
        "starts a worker. Default: the setting of its entry.",
    ),
    option("--cpus", help="CPUs for the worker, such as 0-3. Default: all."),
    option(
        "--pull",
        is_flag=True,
        help="Download the model from the hub first, if this command starts a worker and the model is not on this "
        "machine.",
    ),
)


@click.command(cls=SectionedCommand)
@job_options(
    _worker_options,
    hardware="The hardware class. Default: the setting, or cpu if that is auto.",
    dry_run="Start and write nothing; print an estimate of the job's size.",
)
@click.pass_context
def run(
    ctx: click.Context, /, *, hardware: str | None, cpus: str | None, pooling: str | None, pull: bool, **given: Any
) -> None:
    """Embed CORPUS on this machine alone and write the vectors to --output.

    CORPUS is one or more of: a .jsonl, .json, .csv, .tsv, .txt or .parquet file, compressed or not;
    a folder of such files; a pattern in quotes; - for standard input, which is read as jsonl unless --format says
    otherwise. An OpenAI batch file is told by its first line, and answered like `vllm run-batch` does.

    The command starts a worker and a private Redis, and stops both at the end. If EMBEDCTL_REDIS_URL is set, it uses
    that Redis instead of a private one, and the live workers there that serve the model in this class; it starts its
    own if there are none, or if --cpus or --pooling is given. If EMBEDCTL_URL is set, that gateway's workers encode,
    and nothing is started here. After a crash, the same command resumes where it stopped.
    """
    settings = load_settings()
    if settings.url and (cpus is not None or pooling is not None or pull):
        raise click.UsageError(
            "--cpus, --pooling and --pull are for a worker here, and EMBEDCTL_URL names a gateway: omit them."
        )
    hardware = hardware if settings.url else local_class(settings, hardware)
    command = JobCommand.of(settings, hardware=hardware, **given)
    if not (command.dry_run or command.destination.is_given):
        raise click.UsageError("Missing option '--output' / '-o'.")
    command.check()
    if command.dry_run:
        command = command.checked()
        command.print_estimate(local_estimate(settings, to_encode(command, None), command.choice.options))
        return
    own = [word for flag, value in (("--cpus", cpus), ("--pooling", pooling)) if value for word in (flag, value)]
    name = _named(settings, command, own)
    key = _run_key(command.choice.corpus, name)
    command = command.checked(frees_job=True)
    progress = command.progress()
    with progress, _stack(settings, command, name, key, own, progress.loading, pull=pull) as (ours, watch, token):
        progress.watch = watch
        broker = Broker.shared(ours)
        command = command.keyed(key and key + token)
        command.check_owner(broker)
        synced = brought_up_to_date(broker, command, progress)
        if synced is None:
            status, saved = _encoded(command, broker, progress)
        broker.close()
        progress.stopping()
    if synced is not None:
        ctx.exit(synced.tell(progress, as_json=command.as_json))
    failed_in = "the lines above" if command.destination.database is not None else failures_in(saved.files)
    report(status, progress, failed_in=failed_in)
    report_sum(command.choice.tally, status, progress, saved.refused)
    if command.as_json:
        click.echo(result_json(status, summary(status, progress.resumed_at), saved))
    ctx.exit(exit_status(status, saved.refused))


def _encoded(command: JobCommand, broker: Broker, progress: JobProgress) -> tuple[JobStatus, Delivered]:
    destination, choice = command.destination, command.choice
    job = command.submit(broker, progress)
    with _freed_unless_resumable(job, resumable=choice.options.idempotency_key is not None):
        saved = destination.save(job, broker, progress, requests=choice.requests(destination.path))
        if destination.database is not None:
            list_failed(job, progress)
    status = job.status()
    job.discard()
    return status, saved


@contextmanager
def _freed_unless_resumable(job: Job, *, resumable: bool) -> Iterator[None]:
    """If writing the vectors fails, free the job, unless the same command can resume it."""
    try:
        yield
    except KeyboardInterrupt:
        if resumable:
            raise KeyboardInterrupt("the same command resumes where it stopped") from None
        job.discard()
        raise KeyboardInterrupt("what was read from the pipe is gone; nothing is kept") from None
    except BrokenPipeError:  # nobody reads what it prints
        if not resumable:
            job.discard()
        raise
    except JobLost as error:
        if resumable:
            raise JobLost(f"{error} The same command does that, and resumes.") from None
        with suppress(JobNotFound):
            job.discard()
        raise
    except NOT_TO_FREE:
        raise
    except JobError:
        job.discard()
        raise


@contextmanager
def _stack(
    settings: Settings,
    command: JobCommand,
    named: str,
    key: str | None,
    own: Sequence[str],
    say: Callable[[str], None],
    *,
    pull: bool,
) -> Iterator[tuple[Settings, Callable[[], None], str]]:
    """A Redis, unless one is configured, and a worker, unless one lives there, for as long as the block lasts.

    With options of its `own`, the worker is always ours. With `pull`, a model that it lacks is downloaded. The state
    folder is named by the run's key, if it has one, and then knows commands that are `named` so.

    Yields the settings for this Redis, a function that raises WorkerError if the worker has ended, and the end of the
    job's key. If the block fails, its state folder stays, and the next block of this name resumes with it.
    """
    from embedctl.operating import local

    options = command.choice.options
    model, hardware = options.model or settings.model, str(options.hardware)
    name = key or secrets.token_hex(8)
    with local.state_of(settings, name, kind=named if key else name) as folder:
        if local.was_begun_otherwise(folder):
            say("The corpus has changed since this command was interrupted: starting over")
        if settings.url:
            yield settings, lambda: None, local.token_of(folder)
            local.forget(folder)
            return
        settings.hardware_class(hardware)
        redis = nullcontext((settings, None)) if settings.redis_url else local.private_redis(settings, folder)
        with redis as (ours, _):
            log_file = folder / "worker.log"

            def start() -> AbstractContextManager[Callable[[], None]]:
                if pull:
                    local.pull_model(model, say)
                say(f"Loading {model} (the worker's log: {log_file})")
                return local.local_worker(ours, hardware=hardware, model=model, options=own, log_file=log_file)

            borrows = settings.redis_url and not own
            with (
                local.borrowed_worker(ours, hardware=hardware, model=model, start=start, say=say)
                if borrows
                else start()
            ) as watch:
                # Another machine may run the same command with this Redis; two commands must not free each other's job.
                yield ours, watch, local.token_of(folder) if settings.redis_url else ""
        local.forget(folder)


def _named(settings: Settings, command: JobCommand, own: Sequence[str]) -> str:
    """A name for this command with its options, whatever its corpus holds now."""
    decided = [settings.model, settings.chunk_size, settings.chunk_bytes, settings.max_text_bytes]
    destination = command.destination
    to = None if destination.database is None else destination.database.url
    return _digest([_target(destination.path), to, decided, {**command.named, "worker": own}])


def _target(output: Path | Place | None) -> str | None:
    if output is None:
        return None
    if isinstance(output, Place):
        return output.name
    return "-" if is_stdout(output) else str(output.resolve())


def _run_key(corpus: Corpus | BatchCorpus, command: str) -> str | None:
    """The idempotency key of this run, which the same command has again after a crash; a changed file has another."""
    if not corpus.rereadable:
        return None
    key = hashlib.sha256(command.encode())
    for file in corpus.files:
        path = Path(file.path)
        facts = path.stat()
        key.update(_digest([str(path.resolve()), facts.st_mtime_ns, facts.st_size]).encode())
    return key.hexdigest()


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
