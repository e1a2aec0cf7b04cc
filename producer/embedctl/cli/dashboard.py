"""The dashboard in a browser."""

from __future__ import annotations

from typing import Any

import click

from embedctl.cli.options import option
from embedctl_config.settings import load_settings


@click.command()
@option(
    "--address",
    "flower_address",
    help="Where to listen; any address but a loopback address needs --auth-file. Default: the setting, 127.0.0.1.",
)
@option(
    "--port",
    "flower_port",
    type=click.IntRange(0, 65535),
    help="The port to listen at; 0 for any free port. Default: the setting, 5555.",
)
@option(
    "--auth-file",
    "flower_auth_file",
    type=click.Path(),
    help="A file of lines user:password; only these users may look. Default: the setting.",
)
@option(
    "--url-prefix",
    "flower_url_prefix",
    help="The path under which a reverse proxy shows the dashboard, such as /flower. Default: the setting.",
)
def flower(**given: Any) -> None:
    """Show workers, tickets and queues in a browser with Flower, read-only, until stopped with Ctrl-C.

    Needs the extra `flower`. Only `embedctl status JOB` says what became of a job: a ticket is just a request to look
    at one of its chunks.
    """
    settings = load_settings(**given)
    from embedctl.dashboard.serve import serve

    serve(settings, lambda line: click.echo(line, err=True))
