"""Commands that become other programs: a worker, a local stack, the models, the benchmarks, the gateway."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import click

from embedctl.cli.completion import complete_argument
from embedctl_config.errors import MissingExtra


def _command(name: str, module: str, does: str, *, extra: str = "", without: str = "") -> click.Command:
    """A command that becomes `python -m module`. If that comes with an extra, the error of a missing one says what is
    missing."""

    @click.command(
        name,
        help=f"{does}; see `embedctl {name} --help`.",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        add_help_option=False,
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_argument)
    def become(arguments: tuple[str, ...]) -> None:
        if extra and not find_spec(module):
            raise MissingExtra(extra, without)
        # exec, because nothing that this command imported may be loaded before a worker is pinned.
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606

    return become


COMMANDS = (
    _command("worker", "embedctl_workers", "Encode chunks on this machine until stopped"),
    _command("up", "embedctl_workers.commands.up", "Keep a worker running on each device of this machine"),
    _command("model", "embedctl_workers.commands.model", "Download, build, check and tune models on this machine"),
    _command(
        "bench",
        "embedctl_bench",
        "Measure this machine as published benchmarks do",
        extra="bench",
        without="`embedctl bench`, which the images of workers leave out,",
    ),
    _command(
        "gateway",
        "embedctl_gateway",
        "Answer embedding requests over HTTP, as OpenAI does",
        extra="gateway",
        without="`embedctl gateway`",
    ),
)
