"""Command lines whose errors are one line each, and whose options have variables.

They are not in the producer's command line: `embedctl model` must not import `embedctl`, and NumPy with it, before its
process is pinned to its CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
    try:
        yield
    except EmbedctlError as error:
        click.echo(printable(f"{name}: {error}", lines=True), err=True)
        sys.exit(error.exit_code)


class CommandGroup(click.Group):
    """A group that prints an error, or Ctrl-C, as one line that begins with its `name`, and exits with its status."""

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
