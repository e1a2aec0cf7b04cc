"""`embedctl bench`: the command line."""

from __future__ import annotations

import click

from embedctl_bench import engines, grid, request
from embedctl_config.command_group import CommandGroup


@click.group("embedctl bench", cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure this machine as published benchmarks do.

    Each benchmark writes a report that compares this machine with the published figures. It takes from minutes to
    hours; --quick shows within minutes whether it runs. Ctrl-C writes a report of the measurements so far, and the same
    command resumes from there.
    """


for _module in (request, grid, engines):
    main.add_command(_module.command)


if __name__ == "__main__":
    main(prog_name="embedctl bench")
