"""Commands for operators: check everything, show the settings, make an access list for Redis, serve the dashboard and
the metrics of the backlog."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from embedctl.cli.json_forms import printed_array
from embedctl.cli.options import address_option, json_option, option
from embedctl.operating.acl import access_list, read_passwords
from embedctl.operating.doctor import Finding, Level, examine
from embedctl.queueing.broker import Broker
from embedctl.store.connection import without_password
from embedctl_config.errors import ExitStatus, SettingsError
from embedctl_config.loading import load_settings, survey_settings
from embedctl_config.printable import printable
from embedctl_config.redis_url import database_of
from embedctl_config.settings import SETTINGS, Settings


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, /, as_json: bool) -> None:
    """Check Redis, extras, devices and workers, and say what to do. Exits with 1 if you must fix something."""
    levels = set()
    with printed_array() if as_json else nullcontext() as add:
        for finding in examine(load_settings()):
            levels.add(finding.level)
            if add is None:
                _print_finding(finding)
            else:
                add(dataclasses.asdict(finding))
    ctx.exit(ExitStatus.FAILURE if Level.FAIL in levels else ExitStatus.SUCCESS)


def _print_finding(finding: Finding) -> None:
    click.echo(printable(f"{finding.level:<4}  {finding.subject:<18} {finding.found}"))
    if finding.remedy:
        click.echo(printable(f"{'':<25}→ {finding.remedy}"))


@click.command()
@json_option
@click.pass_context
def repair(ctx: click.Context, /, as_json: bool) -> None:
    """Make every list in Redis again from the jobs' own records.

    Lists say which jobs there are, which of their chunks are ready, whose turn it is and what tenants have waiting. Run
    this after Redis has lost or mixed up some of its keys. Workers and producers go on meanwhile, and a repair that was
    killed is begun again. With an access list, it needs the user admin. Exits with 1 if a job can't be read.
    """
    jobs = others = again = lost = 0
    unreadable: dict[str, str] = {}
    for step in Broker.shared(load_settings()).repair.steps():
        jobs, others, again, lost = jobs + step.jobs, others + step.others, again + step.again, lost + step.lost
        unreadable |= step.unreadable
    if as_json:
        found = {"jobs": jobs, "others": others, "chunks_again": again, "chunks_lost": lost, "unreadable": unreadable}
        click.echo(json.dumps(found))
    else:
        click.echo(
            f"{jobs:,} jobs and {others:,} other records are listed; {again:,} chunks that nobody had are ready again, "
            f"{lost:,} are lost"
        )
        for job_id, why in unreadable.items():
            click.echo(printable(f"{job_id}: left as it is: {why}"), err=True)
    ctx.exit(ExitStatus.FAILURE if unreadable else ExitStatus.SUCCESS)


@click.group()
def config() -> None:
    """Show the settings and their sources, or print an access list for Redis."""


@config.command("show")
@json_option
def show(as_json: bool) -> None:
    """Show every setting, its value and its source. Passwords are left out. Problems come last."""
    settings, sources, problems = survey_settings()
    _show(settings, sources, as_json=as_json)
    if problems:
        raise SettingsError("\n".join(problems))


def _show(settings: Settings, sources: Mapping[str, str], *, as_json: bool) -> None:
    values = {name: value for name, value in dataclasses.asdict(settings).items() if name in SETTINGS}
    values["redis_url"] = without_password(settings.redis_url)
    if "://" in settings.chunk_files:  # it may be refused because of a password
        values["chunk_files"] = without_password(settings.chunk_files)
    if settings.qdrant_api_key:
        values["qdrant_api_key"] = "***"
    if as_json:
        click.echo(json.dumps({name: {"value": value, "source": sources[name]} for name, value in values.items()}))
        return
    for name, value in values.items():
        for label, shown in _rows(name, value):
            click.echo(printable(f"{label:<24} {shown}  ({sources[name]})"))


@config.command("acl")
@option(
    "--passwords",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The folder of the users' passwords: one file per user, readable only by you. Missing files are created.",
)
@option(
    "--redis-7",
    is_flag=True,
    help="Print a list for Redis 7 or newer only, which also denies flower every change to jobs and workers.",
)
def acl(passwords: Path, *, redis_7: bool) -> None:
    """Print an access list (ACL) for Redis.

    The list names the users, the hashes of their passwords, and what each user may do. Redis reads it as its `aclfile`.
    The users are producer, worker, monitor, flower, and admin for yourself; nobody else may log in. The list is for the
    database in the setting redis_url, or for database 0 if the setting names none.
    """
    found, made = read_passwords(passwords)
    for file in made:
        click.echo(f"made {file}", err=True)
    click.echo(access_list(found, database=database_of(load_settings().redis_url), redis_7=redis_7), nl=False)


def _rows(name: str, value: object) -> list[tuple[str, str]]:
    if not isinstance(value, dict):
        return [(name, json.dumps(value))]
    return [(f"{name}.{entry}", json.dumps(facts)) for entry, facts in value.items()]


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
