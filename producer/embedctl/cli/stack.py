"""Commands that become other programs: a worker, a local stack, the models, the benchmarks, the gateway."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import click

from embedctl.cli.completion import complete_argument
from embedctl_config.errors import MissingExtra

_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_argument)


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@_arguments
def up(arguments: tuple[str, ...]) -> None:
    """Keep a worker running on each device of this machine; see `embedctl up --help`."""
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_workers.commands.up", *arguments])  # noqa: S606


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@_arguments
def worker(arguments: tuple[str, ...]) -> None:
    """Encode chunks on this machine until stopped; see `embedctl worker --help`."""
    # exec, because nothing that this command imported may be loaded before the worker is pinned.
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_workers", *arguments])  # noqa: S606


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@_arguments
def model(arguments: tuple[str, ...]) -> None:
    """Download, build, check and tune models on this machine; see `embedctl model --help`."""
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_workers.commands.model", *arguments])  # noqa: S606


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure this machine as published benchmarks do; see `embedctl bench --help`."""
    if not find_spec("embedctl_bench"):
        raise MissingExtra("bench", "`embedctl bench`, which the images of workers leave out,")
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_bench", *arguments])  # noqa: S606


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@_arguments
def gateway(arguments: tuple[str, ...]) -> None:
    """Answer embedding requests over HTTP, as OpenAI does; see `embedctl gateway --help`."""
    if not find_spec("embedctl_gateway"):
        raise MissingExtra("gateway", "`embedctl gateway`")
    os.execv(sys.executable, [sys.executable, "-m", "embedctl_gateway", *arguments])  # noqa: S606
