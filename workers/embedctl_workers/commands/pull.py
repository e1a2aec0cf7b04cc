"""`embedctl model pull`: downloads a model from the hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from embedctl_config.command_group import option
from embedctl_config.errors import MissingExtra
from embedctl_config.loading import load_settings
from embedctl_config.printable import printable
from embedctl_config.settings import Settings
from embedctl_workers.commands.options import json_option, log_plainly

if TYPE_CHECKING:
    from embedctl_workers.models.pulling.progress import Progress
    from embedctl_workers.models.pulling.pull import Pulled


@click.command()
@click.argument("model", metavar="NAME[@REVISION]")
@option(
    "--allow-pickle",
    is_flag=True,
    help="Also take weights that are pickles (.bin), which can run code when they are loaded.",
)
@option(
    "--if-missing",
    is_flag=True,
    help="Do not ask the hub if the model is on this machine, even if it has changed there.",
)
@json_option
def pull(model: str, *, allow_pickle: bool, if_missing: bool, as_json: bool) -> None:
    """Download a model of the hub into the hub's cache, and print its folder.

    Takes the files that workers need and no others, resumes where an earlier download stopped, and compares every
    file with the hash that the hub lists. REVISION is a branch, a tag or a commit; the default is main, or the one of
    the name's [models.NAME] entry.

    HF_TOKEN is for models that not everyone may read, HF_ENDPOINT for another hub, HF_HUB_CACHE for another cache
    folder. With HF_HUB_OFFLINE=1, the hub is not asked.
    """
    settings = load_settings()
    log_plainly()
    name, revision = _parted(model, settings)
    with _progress() as progress:
        try:
            from embedctl_workers.models.pulling.pull import pull as download

            pulled = download(
                name, settings, progress, revision=revision, allow_pickle=allow_pickle, if_missing=if_missing
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command resumes where it stopped") from None
        except ModuleNotFoundError as error:
            if error.name != "huggingface_hub":
                raise
            raise MissingExtra("torch", "`embedctl model pull`") from error
    click.echo(json.dumps(_facts(pulled)) if as_json else str(pulled.folder))
    if not as_json:
        click.echo(f"fingerprint {pulled.fingerprint}", err=True)
        if revision and settings.models.get(name) is None:
            click.echo(_how_to_use(pulled), err=True)


def _parted(model: str, settings: Settings) -> tuple[str, str]:
    """The name and the revision, which may be empty. The settings may have a name with an @."""
    if model in settings.models:
        return model, ""
    name, _, revision = model.partition("@")
    return name, revision


def _facts(pulled: Pulled) -> dict[str, object]:
    known = {name: None if value == "" else value for name, value in asdict(pulled).items()}
    return {**known, "folder": str(pulled.folder)}


def _how_to_use(pulled: Pulled) -> str:
    return (
        f'To serve it as "{pulled.name}", say so in the settings of workers: [models."{pulled.name}"] with '
        f'revision = "{pulled.revision}"'
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """Progress on standard error: a line that moves on a terminal, else lines."""
    from rich.console import Console

    from embedctl_workers.models.pulling.progress import Progress

    def say(line: str) -> None:
        click.echo(printable(line), err=True)

    console = Console(stderr=True)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        yield Progress(say)
        return
    from embedctl.terminal.columns import BottomLine, cut, plain

    progress = Progress(say, in_log=False)
    line = BottomLine(console, lambda width: cut(plain(progress.line()), width))
    line.start()
    try:
        yield progress
    finally:
        line.end(keep=False)
