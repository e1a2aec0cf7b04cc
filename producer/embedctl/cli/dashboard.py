"""The dashboard in a browser, and the metrics of the backlog."""

from __future__ import annotations

from typing import Any

import click

from embedctl.cli.options import address_option, option
from embedctl_config.loading import load_settings


@click.command()
@address_option("flower_address", "any except a loopback address needs --auth-file")
@option(
    "--auth-file",
    "flower_auth_file",
    type=click.Path(),
    help="A file with lines user:password; only these users may see the dashboard. Default: the setting.",
)
@option(
    "--url-prefix",
    "flower_url_prefix",
    help="The path under which a reverse proxy serves the dashboard, such as /flower. Default: the setting.",
)
def flower(**given: Any) -> None:
    """Show workers, chunks and queues in a browser, read-only.

    Runs Flower until stopped with Ctrl-C. Needs the extra `flower`. Flower shows which
    worker took which chunk, and not the state of a job. For the state, use `embedctl status JOB`.
    """
    settings = load_settings(**given)
    from embedctl.operating.dashboard.serve import serve

    serve(settings, lambda line: click.echo(line, err=True))


@click.command()
@address_option("metrics_address", "there is no password and no TLS")
def metrics(**given: Any) -> None:
    """Serve what waits in Redis as metrics for Prometheus.

    Runs until stopped with Ctrl-C, and needs the extra `metrics`. One such process is enough for a Redis; its user may
    be monitor (`embedctl config acl`). Workers serve their own metrics if metrics_address is set.
    """
    settings = load_settings(**given)
    from embedctl.operating.monitoring.serve import serve

    serve(settings, lambda line: click.echo(line, err=True))
