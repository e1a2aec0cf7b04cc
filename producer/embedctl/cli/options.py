"""Options that several commands share. Every option has an `EMBEDCTL_*` variable of the same name.

And what the shell offers for a job, a class or a model: neither an error nor a slow Redis ever shows in a prompt.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from embedctl_config.command_group import option as option  # for all commands
from embedctl_config.loading import load_settings
from embedctl_config.printable import printable
from embedctl_config.settings import SETTINGS, Settings

if TYPE_CHECKING:
    from embedctl.queueing.broker import Broker

T = TypeVar("T")

#: The longest that a user waits for Redis after pressing Tab (seconds).
_PATIENCE_S = 1.0
#: Most jobs that are offered.
_OFFERED = 50
F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
#: The section in which help lists an option that names none, such as --help.
_LAST = "Output"


def complete_job(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The newest jobs whose ids begin so, else those whose ids end so; without those already on the command line."""
    named = {word for value in ctx.params.values() for word in (value if isinstance(value, tuple) else (value,))}
    return [item for item in _within_patience(lambda: _jobs(ctx, incomplete)) if item.value not in named]


def complete_class(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _offered(incomplete, lambda settings: settings.classes, lambda hardware, _: hardware, ctx)


def complete_model(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _offered(incomplete, _models, lambda _, model: model, ctx)


def complete_argument(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What follows `--class` or `--model` in the arguments of a command that becomes another program."""
    before = (ctx.params.get(parameter.name or "") or ("",))[-1]
    complete = {"--class": complete_class, "--model": complete_model}.get(before)
    return complete(ctx, parameter, incomplete) if complete else []


def _jobs(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    from embedctl.store.job_ids import newest_first

    broker = _broker(ctx)

    def newest(fits: Callable[[str, str], bool]) -> list[str]:
        ids = chain.from_iterable(newest_first(broker.connection))
        return list(islice((job_id for job_id in ids if fits(job_id, incomplete)), _OFFERED))

    jobs = broker.jobs.find(newest(str.startswith) or newest(str.endswith))
    return [
        CompletionItem(job.id, help=printable(f"{job.state}, {job.records:,} records, {job.model}")) for job in jobs
    ]


def _models(settings: Settings) -> Iterable[str]:
    return [settings.model, *settings.models, *chain.from_iterable(each.models for each in settings.classes.values())]


def _broker(ctx: click.Context) -> Broker:
    from embedctl.queueing.broker import Broker  # here, because commands that use no Redis complete words too

    return Broker.shared(_settings(ctx))


def _offered(
    incomplete: str,
    configured: Callable[[Settings], Iterable[str]],
    served: Callable[[str, str], str],
    ctx: click.Context,
) -> list[CompletionItem]:
    def live() -> list[str]:
        return [served(hardware, model) for hardware, model, _ in _broker(ctx).workers.offers()]

    found = {*_within_patience(lambda: list(configured(_settings(ctx)))), *_within_patience(live)}
    return [CompletionItem(name) for name in sorted(found) if name.startswith(incomplete) and name.isprintable()]


def _settings(ctx: click.Context) -> Settings:
    return load_settings(insecure=ctx.find_root().params.get("insecure") or None)


def _within_patience(question: Callable[[], list[T]]) -> list[T]:
    """The answer to a question; none if there is an error, or no answer in time."""
    logging.disable()  # the process only completes, and ends
    answer: list[T] = []

    def ask() -> None:
        with suppress(Exception):  # whatever it is, a prompt is no place for it
            answer.extend(question())

    # A daemon, because a Redis that does not answer may keep it for longer.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    return list(answer)


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
vectors_option = option(
    "--vectors",
    metavar="KINDS",
    help="What one pass over the text gives: some of dense, sparse and multi, as the model can, such as dense,sparse. "
    "Default: dense.",
)
quiet_option = option("--quiet", "-q", is_flag=True, help="Show no progress.")
