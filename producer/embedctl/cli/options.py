"""Options that several commands share. Every option has an `EMBEDCTL_*` variable of the same name."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import click

from embedctl.cli.completion import complete_job
from embedctl_config.command_group import option as option  # for all commands
from embedctl_config.settings import SETTINGS

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
#: The section in which help lists an option that names none, such as --help.
_LAST = "Output"


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several decorators as one, applied so that help lists them in this order."""

    def decorate(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def section(heading: str, *decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options that :class:`SectionedCommand` lists under a heading."""

    def decorate(command: F) -> F:
        before = len(getattr(command, "__click_params__", ()))
        command = together(*decorators)(command)
        for param in command.__click_params__[before:]:  # type: ignore[attr-defined]  # click's own
            param.section = heading
        return command

    return decorate


class SectionedCommand(click.Command):
    """A command with many options, which help lists by sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if not isinstance(param, click.Argument) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "section", _LAST), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def address_option(setting: str, note: str) -> Callable[[F], F]:
    """The option for a setting that says where a process listens, with a note on who can reach it."""
    default = SETTINGS[setting].default or "127.0.0.1:0"
    text = f"Where to listen; {note}. A port alone is one of 127.0.0.1, and port 0 any free one."
    return option("--address", setting, metavar="HOST:PORT", help=f"{text} Default: the setting, {default}.")


def duration(text: str) -> timedelta:
    """The time of an option; click.BadParameter if it is none."""
    found = re.fullmatch(rf"([0-9]{{1,5}})([{''.join(_UNITS)}])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a number and a unit, such as 30m, 12h or 7d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


job_argument = click.argument("job_id", metavar="JOB", shell_complete=complete_job)
json_option = option("--json", "as_json", is_flag=True, help="Print one JSON value.")
quiet_option = option("--quiet", "-q", is_flag=True, help="Show no progress.")
