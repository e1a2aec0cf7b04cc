"""`embedctl bench`: the command line."""

from __future__ import annotations

import sys
from typing import Any

import click

from embedctl_config.errors import EmbedctlError
from embedctl_workers.bench import grid, matrix, request, study

_INTERRUPTED = 130


class _Group(click.Group):
    """Turns our errors into one line and their exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EmbedctlError as error:
            click.echo(f"embedctl bench: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("embedctl bench: interrupted; the same command goes on from what was measured", err=True)
            sys.exit(_INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure this machine as published benchmarks measure theirs, and write reports beside their figures.

    Each takes from minutes to hours; --quick shows in minutes whether it runs. Ctrl-C writes a report of what was
    measured until then, and the same command goes on from there.
    """


for _module in (request, matrix, study, grid):
    main.add_command(_module.command)


if __name__ == "__main__":
    main(prog_name="embedctl bench")
