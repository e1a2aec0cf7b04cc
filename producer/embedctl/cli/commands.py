"""The commands, each imported when it is called: all of them together take longer than most of them run."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

import click

from embedctl.cli.options import complete_argument
from embedctl_config.command_group import CommandGroup
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


_OTHER_PROGRAMS = (
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


class Later(click.Command):
    """A command that is still to be imported, with the first sentence of its help."""

    def __init__(self, name: str, module: str, does: str) -> None:
        super().__init__(name, help=does)
        self._module = f"embedctl.cli.{module}"

    def load(self) -> click.Command:
        found = vars(import_module(self._module)).values()
        return next(each for each in found if isinstance(each, click.Command) and each.name == self.name)


class Commands(CommandGroup):
    """A group that imports a command when it is asked for it, and none for the list in its own help."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = self.commands.get(cmd_name)
        if isinstance(command, Later):
            command = self.commands[cmd_name] = command.load()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        click.Group(commands=self.commands).format_commands(ctx, formatter)


_EACH: tuple[click.Command, ...] = (
    Later("submit", "submit", "Queue CORPUS and print the job's id."),
    Later("run", "run", "Embed CORPUS on this machine alone and write the vectors to --output."),
    Later("plan", "planning", "Say how many workers, how much Redis memory and how many hours a corpus takes."),
    Later("status", "status", "Show all workers, queues and jobs, or one job."),
    Later("list", "listing", "Show the jobs in Redis, or those of the key's tenant in a gateway, newest first."),
    Later("wait", "jobs", "Wait until a job has ended."),
    Later("fetch", "jobs", "Write a job's vectors, and wait for any that are not ready yet."),
    Later("errors", "jobs", "List the records of an ended job that have no vector."),
    Later("destinations", "delivery", "List the databases that -o can deliver to."),
    Later("retry", "disposal", "Queue the failed records of ended jobs again."),
    Later("stop", "disposal", "End jobs now and keep what is done, for `embedctl fetch`."),
    Later("cancel", "disposal", "End jobs now and free their data in Redis, vectors too."),
    Later("discard", "disposal", "Delete jobs and all their data from Redis now."),
    *_OTHER_PROGRAMS,
    Later("flower", "operate", "Show workers, chunks and queues in a browser, read-only."),
    Later("metrics", "operate", "Serve what waits in Redis as metrics for Prometheus."),
    Later("doctor", "operate", "Check Redis, extras, devices and workers, and say what to do."),
    Later("repair", "operate", "Make every list in Redis again from the jobs' own records."),
    Later("config", "operate", "Show the settings and their sources, or print an access list for Redis."),
)
COMMANDS = {str(command.name): command for command in _EACH}
