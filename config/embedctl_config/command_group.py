"""A group of commands whose errors are one line each.

Here, as `embedctl model` must not import `embedctl`, which imports numpy, before it is pinned to its CPUs.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from embedctl_config.errors import EmbedctlError
from embedctl_config.printable import printable

__all__ = ["CommandGroup"]

_INTERRUPTED = 130


class CommandGroup(click.Group):
    """Turns our errors, and Ctrl-C, into one line and their exit status. Its `name` begins the line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EmbedctlError as error:
            click.echo(printable(f"{self.name}: {error}", lines=True), err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt as interrupt:
            said = f"{self.name}: interrupted{'; ' if interrupt.args else ''}{' '.join(interrupt.args)}"
            click.echo(printable(said), err=True)
            sys.exit(_INTERRUPTED)
        except BrokenPipeError:
            # Whoever read our output has seen enough; Python must not complain again as it flushes.
            sys.stdout = None
            sys.exit(0)
