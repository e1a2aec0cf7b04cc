"""The commands, each imported when it is called: all of them together take longer than most of them run."""

from __future__ import annotations

from importlib import import_module

import click

from embedctl.cli import stack
from embedctl_config.command_group import CommandGroup


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
    *stack.COMMANDS,
    Later("flower", "dashboard", "Show workers, chunks and queues in a browser, read-only."),
    Later("metrics", "dashboard", "Serve what waits in Redis as metrics for Prometheus."),
    Later("doctor", "operate", "Check Redis, extras, devices and workers, and say what to do."),
    Later("repair", "operate", "Make every list in Redis again from the jobs' own records."),
    Later("config", "operate", "Show the settings and their sources, or print an access list for Redis."),
)
COMMANDS = {str(command.name): command for command in _EACH}
