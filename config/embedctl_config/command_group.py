"""Command lines whose errors are one line each, and whose options have variables.

They are not in the producer's command line: `embedctl model` must not import `embedctl`, and NumPy with it, before its
process is pinned to its CPUs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from embedctl_config.errors import EmbedctlError, ExitStatus
from embedctl_config.printable import printable
from embedctl_config.settings import ENV_PREFIX, SETTINGS

__all__ = ["CommandGroup", "one_line_errors", "option"]

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """A click option with its variable: the setting's if its parameter has a setting's name, else the flag's own."""
    flag = names[0].partition("/")[0].removeprefix("--").replace("-", "_")
    name = names[-1] if names[-1] in SETTINGS else flag
    return click.option(*names, envvar=ENV_PREFIX + name.upper(), show_envvar=True, **attributes)


@contextmanager
def one_line_errors(name: str | None) -> Iterator[None]:
    """Print an :class:`EmbedctlError` as one line that begins with this name, and exit with its status."""
    _end_on_sigterm()
    try:
        yield
    except EmbedctlError as error:
        click.echo(printable(f"{name}: {error}", lines=True), err=True)
        sys.exit(error.exit_code)


def _end_on_sigterm() -> None:
    """Let SIGTERM end this process, until something else handles it, also if it is the first of a container: from that
    one, the kernel keeps signals that nothing handles."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def _refuse_repeated(ctx: click.Context, args: Sequence[str]) -> None:
    """Raise UsageError if an option of a command has more values than it takes."""
    try:
        *_, given = ctx.command.make_parser(ctx).parse_args(list(args))
    except click.UsageError:
        return  # it is about to be raised again
    for param, count in Counter(given).items():
        if isinstance(param, click.Option) and count > 1 and not (param.multiple or param.is_flag or param.count):
            raise click.BadOptionUsage(param.opts[0], f"{param.opts[0]} takes one value, and is given {count}.", ctx)


class CommandGroup(click.Group):
    """A group that prints an error, or Ctrl-C, as one line that begins with its `name`, and exits with its status.

    An option of a command that takes one value, and is given several, is refused: click would drop all but the last.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            _refuse_repeated(click.Context(command, parent=ctx, info_name=name), rest)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with one_line_errors(self.name):
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            said = f"{self.name}: interrupted{'; ' if interrupt.args else ''}{' '.join(interrupt.args)}"
            click.echo(printable(said), err=True)
            sys.exit(ExitStatus.INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output has closed it. Python would flush standard output at exit, and complain again.
            sys.stdout = None
            sys.exit(ExitStatus.SUCCESS)
