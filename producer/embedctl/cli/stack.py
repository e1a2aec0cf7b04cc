"""What runs on this machine: a whole job, a local stack, a worker."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from embedctl.broker import Broker
from embedctl.cli.corpora import CorpusChoice, submit_choice
from embedctl.cli.options import corpus_options, cpus_option, option, output_option
from embedctl.cli.results import bar_beside, exit_status, report, save
from embedctl.kept import parse_keep
from embedctl.output import check_output, is_stdout
from embedctl.routing import local_class
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import JobError, JobLost, JobNotFound, JobStalled, MissingExtra
from embedctl_config.settings import Settings, load_settings

_class_option = option("--class", "hardware", help="The hardware class. Default: the setting, or cpu if that is auto.")


@click.command()
@corpus_options
@_class_option
@cpus_option
@output_option(required=True)
@click.pass_context
def run(ctx: click.Context, /, *, output: Path, cpus: str | None, quiet: bool, **options: Any) -> None:
    """Embed CORPUS on this machine alone and write the vectors.

    The command starts a worker and a private Redis, and stops both at the end. If EMBEDCTL_REDIS_URL is set, it uses
    that Redis instead of a private one. After a crash, the same command continues where it stopped.
    """
    settings = load_settings()
    check_output(output, parse_keep(options["keep"]))
    options["hardware"] = local_class(settings, options["hardware"])
    decided = [settings.model, settings.chunk_size, settings.chunk_bytes, settings.max_text_bytes]
    key = _run_key(output, cpus=cpus, decided=decided, **options)
    choice = CorpusChoice.of(settings, idempotency_key=key, **options)
    choice.check()
    model = choice.options.model or settings.model
    progress = JobProgress(quiet=quiet, bar=bar_beside(output))
    name = key or secrets.token_hex(8)
    with _stack(settings, name, options["hardware"], model, cpus, progress.say) as (ours, watch):
        progress.watch = watch
        broker = Broker.connect(ours)
        with progress:
            job = submit_choice(broker, choice, progress)
            try:
                save(job, output, progress)
            except KeyboardInterrupt:
                if key is None:
                    job.discard()
                    raise KeyboardInterrupt("what was read from the pipe is gone; nothing is kept") from None
                raise KeyboardInterrupt("the same command continues where it stopped") from None
            except BrokenPipeError:  # nobody reads what it prints
                if key is None:
                    job.discard()
                raise
            except JobLost as error:
                if key is None:
                    with suppress(JobNotFound):
                        job.discard()
                    raise
                raise JobLost(f"{error} The same command does that, and continues.") from None
            except (JobNotFound, JobStalled):  # nothing is left to free, or the same command continues
                raise
            except JobError:
                job.discard()
                raise
        status = job.status()
        job.discard()
        broker.close()
    report(status, progress)
    ctx.exit(exit_status(status))


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def up(arguments: tuple[str, ...]) -> None:
    """Keep a worker running on each device of this machine; see `embedctl up --help`."""
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_workers.commands.up", *arguments])  # noqa: S606


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Encode chunks on this machine until stopped; see `embedctl worker --help`."""
    # exec, because nothing that this command imported may be loaded before the worker is pinned.
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_workers", *arguments])  # noqa: S606


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def model(arguments: tuple[str, ...]) -> None:
    """Build, check and tune models on this machine; see `embedctl model --help`."""
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_workers.commands.model", *arguments])  # noqa: S606


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure this machine as published benchmarks do; see `embedctl bench --help`."""
    if not find_spec("embedctl_bench"):
        raise MissingExtra("bench", "`embedctl bench`, which the images of workers leave out,")
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_bench", *arguments])  # noqa: S606


@contextmanager
def _stack(
    settings: Settings, name: str, hardware: str, model: str, cpus: str | None, say: Callable[[str], None]
) -> Iterator[tuple[Settings, Callable[[], None]]]:
    """A Redis, unless one is configured, and a worker, for as long as the block lasts.

    Yields the settings for this Redis, and a function that raises WorkerError if the worker has ended. If the block
    fails, its state folder stays, and the next block of this name continues with it.
    """
    from embedctl import local

    settings.hardware_class(hardware)
    with local.state_of(settings, name) as folder:
        redis = nullcontext(settings) if settings.redis_url else local.private_redis(settings, folder)
        with redis as ours:
            log_file = folder / "worker.log"
            say(f"Loading {model} (the worker's log: {log_file})")
            with local.local_worker(ours, hardware=hardware, model=model, cpus=cpus, log_file=log_file) as watch:
                yield ours, watch
        shutil.rmtree(folder, ignore_errors=True)


def _run_key(output: Path, **options: Any) -> str | None:
    """The idempotency key of this run, which the same command has again after a crash; a changed file has another."""
    path = Path(options["corpus_path"])
    if not path.is_file():
        return None
    facts = path.stat()
    target = "-" if is_stdout(output) else str(output.resolve())
    return json.dumps([str(path.resolve()), facts.st_mtime_ns, facts.st_size, target, options])
