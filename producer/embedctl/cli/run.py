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

from embedctl.broker import Broker
from embedctl.cli.changes import Asked, to_encode, update
from embedctl.cli.completion import complete_class
from embedctl.cli.corpora import CorpusChoice, print_estimate, submit_choice
from embedctl.cli.delivery import SinkChoice, list_failed, to_options
from embedctl.cli.json_forms import result_json
from embedctl.cli.options import (
    changes_options,
    chosen_numbers,
    corpus_options,
    cpus_option,
    json_option,
    no_clobber_option,
    numbers_options,
    one_file_option,
    option,
    output_option,
)
from embedctl.cli.results import check_destination, exit_status, failures_in, may_move, report, save, summary
from embedctl.cli.update_report import report_update
from embedctl.corpus import BatchCorpus, Corpus
from embedctl.drain.places import Place
from embedctl.estimate import local_estimate
from embedctl.job import Job
from embedctl.output import is_stdout
from embedctl.routing import local_class
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import JobError, JobLost, JobNotFound, JobStalled
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings


@click.command()
@corpus_options
@changes_options
@option(
    "--class",
    "hardware",
    shell_complete=complete_class,
    help="The hardware class. Default: the setting, or cpu if that is auto.",
)
@cpus_option
@output_option()
@to_options
@one_file_option
@numbers_options
@no_clobber_option
@option(
    "--pull",
    is_flag=True,
    help="Download the model from the hub first, if this command starts a worker and the model is not on this machine.",
)
@option("--dry-run", is_flag=True, help="Start and write nothing; print an estimate of the job's size.")
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    output: Path | Place | None,
    to: str | None,
    on_duplicate_id: str | None,
    id: str | None,  # noqa: A002  (the flag's name)
    allow_mixed: bool,
    one_file: bool,
    output_type: str | None,
    ranges: Path | None,
    no_clobber: bool,
    cpus: str | None,
    pull: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Embed CORPUS on this machine alone and write the vectors to --output, or into the database of --to.

    CORPUS is one or more of: a .jsonl, .json, .csv, .tsv, .txt or .parquet file, optionally compressed (.gz or .zst);
    a folder of such files; a pattern in quotes; - for standard input, which is read as jsonl unless --format says
    otherwise. An OpenAI batch file is told by its first line, and answered like `vllm run-batch` does.

    The command starts a worker and a private Redis, and stops both at the end. If EMBEDCTL_REDIS_URL is set, it uses
    that Redis instead of a private one, and the live workers there that serve the model in this class; it starts its
    own if there are none, or if --cpus is given. After a crash, the same command continues where it stopped.
    """
    settings = load_settings()
    asked = Asked.taken_from(options, to)
    numbers = chosen_numbers(output_type, ranges)
    sink = SinkChoice.of(
        settings,
        output,
        output_type,
        to=to,
        on_duplicate_id=on_duplicate_id,
        id=id,
        allow_mixed=allow_mixed,
        is_update=asked.to is not None,
        delete_missing=asked.delete_missing,
    )
    options["hardware"] = local_class(settings, options["hardware"])
    choice = CorpusChoice.of(settings, output=output, **options)
    if dry_run:
        choice = choice.checked(as_json=as_json)
        asked.check(choice, output)
        records = to_encode(choice, asked, output, numbers, None)
        print_estimate(local_estimate(settings, records, choice.options), as_json=as_json)
        return
    if output is None and sink is None:
        raise click.UsageError("Missing option '--output' / '-o', or '--to'.")
    choice.check_one_file(one_file, output)
    asked.check(choice, output)
    if output is not None:
        check_destination(
            output,
            choice.keep,
            clobber=not no_clobber,
            as_json=as_json,
            numbers=numbers,
            batch=choice.is_batch and not one_file,
        )
    command = _command(settings, output, to, cpus=cpus, **options, **asked.named())
    key = _run_key(choice.corpus, command)
    choice = choice.checked(as_json=as_json)
    sink = sink and sink.checked(choice.corpus)
    name = key or secrets.token_hex(8)
    kind = command if key else name
    model = choice.options.model or settings.model
    progress = JobProgress(quiet=quiet, moving=may_move(output))
    stack = _stack(settings, name, kind, options["hardware"], model, cpus, progress.loading, pull=pull)
    if isinstance(output, Path) and asked.applies(choice, output):
        with progress, stack as (ours, progress.watch, token):
            broker = Broker.connect(ours)
            choice = choice.keyed(key and key + token)
            outcome = update(
                broker,
                choice,
                asked,
                output,
                progress,
                submit_choice,
                numbers=numbers,
                clobber=not no_clobber,
                sink=sink,
            )
            broker.close()
            progress.stopping()
        ctx.exit(report_update(outcome, output, progress, as_json=as_json))
    with progress, stack as (ours, progress.watch, token):
        broker = Broker.connect(ours)
        job = submit_choice(broker, choice.keyed(key and key + token), progress, output, numbers)
        written: Sequence[Path | str] = ()
        with _freed_unless_it_goes_on(job, resumable=key is not None):
            if sink is not None:
                sink.save(job, broker, progress)
                list_failed(job, progress)
            elif output is not None:
                written = save(
                    job,
                    output,
                    progress,
                    clobber=not no_clobber,
                    one_file=one_file,
                    numbers=numbers,
                    requests=choice.requests(output),
                )
        status = job.status()
        job.discard()
        broker.close()
        progress.stopping()
    report(status, progress, failed_in="the lines above" if sink is not None else failures_in(written))
    if as_json:
        click.echo(result_json(status, summary(status, progress.continued_at), written))
    ctx.exit(exit_status(status))


@contextmanager
def _freed_unless_it_goes_on(job: Job, *, resumable: bool) -> Iterator[None]:
    """If writing the vectors fails, free the job, unless the same command can continue it."""
    try:
        yield
    except KeyboardInterrupt:
        if resumable:
            raise KeyboardInterrupt("the same command continues where it stopped") from None
        job.discard()
        raise KeyboardInterrupt("what was read from the pipe is gone; nothing is kept") from None
    except BrokenPipeError:  # nobody reads what it prints
        if not resumable:
            job.discard()
        raise
    except JobLost as error:
        if resumable:
            raise JobLost(f"{error} The same command does that, and continues.") from None
        with suppress(JobNotFound):
            job.discard()
        raise
    except (JobNotFound, JobStalled):  # nothing is left to free, or the same command continues
        raise
    except JobError:
        job.discard()
        raise


@contextmanager
def _stack(
    settings: Settings,
    name: str,
    kind: str,
    hardware: str,
    model: str,
    cpus: str | None,
    say: Callable[[str], None],
    *,
    pull: bool,
) -> Iterator[tuple[Settings, Callable[[], None], str]]:
    """A Redis, unless one is configured, and a worker, unless one lives there, for as long as the block lasts.

    With `cpus`, the worker is always our own. With `pull`, a model that it lacks is downloaded.

    Yields the settings for this Redis, a function that raises WorkerError if the worker has ended, and the end of the
    job's key. If the block fails, its state folder stays, and the next block of this name continues with it.
    """
    from embedctl import local

    settings.hardware_class(hardware)
    with local.state_of(settings, name, kind=kind) as folder:
        if local.was_begun_otherwise(folder):
            say("The corpus has changed since this command was interrupted: starting over")
        redis = nullcontext(settings) if settings.redis_url else local.private_redis(settings, folder)
        with redis as ours:
            log_file = folder / "worker.log"

            def start() -> AbstractContextManager[Callable[[], None]]:
                if pull:
                    local.pull_model(model, say)
                say(f"Loading {model} (the worker's log: {log_file})")
                return local.local_worker(ours, hardware=hardware, model=model, cpus=cpus, log_file=log_file)

            borrows = settings.redis_url and cpus is None
            with (
                local.borrowed_worker(ours, hardware=hardware, model=model, start=start, say=say)
                if borrows
                else start()
            ) as watch:
                # Another machine may run the same command with this Redis; two commands must not free each other's job.
                yield ours, watch, local.token_of(folder) if settings.redis_url else ""
        local.forget(folder)


def _command(settings: Settings, output: Path | Place | None, to: str | None, **options: Any) -> str:
    """A name for this command with its options, whatever its corpus holds now."""
    decided = [settings.model, settings.chunk_size, settings.chunk_bytes, settings.max_text_bytes]
    if output is None:
        return _digest([["to", to], {"decided": decided, **options}])
    if to is not None:
        options["to"] = to
    return _digest([_target(output), {"decided": decided, **options}])


def _target(output: Path | Place) -> str:
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
