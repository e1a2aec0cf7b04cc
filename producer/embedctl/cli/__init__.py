"""The command line: parse, call the library, print. Job ids and data go to standard output, the rest to stderr."""

from __future__ import annotations

import logging
import os

import click

from embedctl.cli.commands import COMMANDS, Commands
from embedctl.cli.options import option
from embedctl_config import __version__
from embedctl_config.printable import PrintableFormatter
from embedctl_config.settings import ENV_PREFIX

__all__ = ["main"]


@click.group("embedctl", cls=Commands, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="embedctl")
@option(
    "--insecure",
    is_flag=True,
    help="For rediss://: skip all checks of the certificate; anyone on the network path can then read and change "
    "everything.",
)
def main(*, insecure: bool) -> None:
    """Turn a corpus into embedding vectors without losing any.

    On one machine: embedctl run corpus.jsonl -o vectors.npy

    On many: set EMBEDCTL_REDIS_URL, start `embedctl worker` on each, then `embedctl submit corpus.jsonl`.

    Exit status: 0 all vectors, 1 job failed, 2 usage, 3 some records failed, 4 not found, 65 another model's vectors,
    69 Redis or database unavailable, 77 not permitted, 124 timed out, 130 interrupted.

    Shell completion: eval "$(_EMBEDCTL_COMPLETE=bash_source embedctl)", or zsh_source, fish_source.
    """
    if logging.lastResort is not None:  # prints warnings if no logging is configured
        logging.lastResort.setFormatter(PrintableFormatter())
    if insecure:
        # Workers that this process starts have the same setting.
        os.environ[f"{ENV_PREFIX}INSECURE"] = "true"
