"""`embedctl gateway`: the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from embedctl.cli.options import address_option, json_option, option
from embedctl_config.command_group import CommandGroup
from embedctl_config.errors import SettingsError
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings, expanded
from embedctl_gateway.access.verbs import USUAL, VERBS

_keys_option = option(
    "--keys",
    "gateway_keys_file",
    type=click.Path(),
    metavar="FILE",
    help="The file of keys. Default: the setting.",
)


@click.group(
    "embedctl gateway",
    cls=CommandGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@address_option("gateway_address", "any except a loopback address needs --keys")
@_keys_option
@click.pass_context
def main(context: click.Context, /, **given: Any) -> None:
    """Answer embedding requests over HTTP, as OpenAI, TEI and infinity do.

    Runs until stopped with Ctrl-C, and needs the extra `gateway`. It serves the models of the live workers. Several
    gateways may share a Redis.
    """
    if context.invoked_subcommand is not None:
        return
    settings = load_settings(**given)
    from embedctl_gateway.serving.serve import serve

    serve(settings, lambda line: click.echo(line, err=True))


@main.group("key")
def key() -> None:
    """Make, list or remove the keys of callers.

    A running gateway notices within a second.
    """


@key.command("add")
@click.argument("name")
@option("--tenant", help="Whom the jobs of this key's requests belong to. Default: the setting.")
@option(
    "--may",
    multiple=True,
    type=click.Choice([*VERBS]),
    default=USUAL,
    show_default=True,
    help=f"What it is for; repeat it for more. {'; '.join(f'{verb}: {what}' for verb, what in VERBS.items())}.",
)
@_keys_option
def add(name: str, *, may: tuple[str, ...], **given: Any) -> None:
    """Make the key NAME, and print it once: the file holds only its hash."""
    from embedctl_gateway.access.key_file import add_key

    settings = load_settings(**given)
    click.echo(add_key(_file(settings), name, settings.tenant, may))


@key.command("list")
@json_option
@_keys_option
def list_keys(*, as_json: bool, **given: Any) -> None:
    """List the names, tenants, days and verbs of the keys."""
    import json

    from embedctl_gateway.access.key_file import read_keys

    found = read_keys(_file(load_settings(**given)))
    if as_json:
        facts = ({"name": each.name, "tenant": each.tenant, "day": each.day, "may": each.verbs} for each in found)
        click.echo(json.dumps([*facts]))
        return
    for each in found:
        click.echo(f"{each.name:<24} {each.tenant:<24} {each.day}  {', '.join(each.verbs)}")


@key.command("remove")
@click.argument("name")
@_keys_option
def remove(name: str, **given: Any) -> None:
    """Remove the key NAME; requests with it are refused from then on."""
    from embedctl_gateway.access.key_file import remove_key

    remove_key(_file(load_settings(**given)), name)


def _file(settings: Settings) -> Path:
    if not settings.gateway_keys_file:
        raise SettingsError("no file of keys is named: use --keys FILE, or set EMBEDCTL_GATEWAY_KEYS_FILE")
    return expanded(settings.gateway_keys_file, "gateway_keys_file")


if __name__ == "__main__":
    main(prog_name="embedctl gateway")
