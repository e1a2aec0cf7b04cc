"""Options that the commands of this package share, and what else they do alike.

Imports nothing that starts threads: pinning comes first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import click

from embedctl_config.command_group import option
from embedctl_config.hardware import POOLINGS, ModelEntry
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def class_option(default: str) -> _Decorator:
    """`--class`, as `hardware`; the default is the class that the setting `auto` means here."""
    return option(
        "--class", "hardware", help=f"The hardware class. Default: the setting, or {default} if that is auto."
    )


cpus_option = option("--cpus", help="CPUs to run on, such as 0-3 or 0,2. Default: all.")
gpu_option = option(
    "--gpu",
    metavar="UUID|INDEX",
    help="The GPU to run on, as nvidia-smi shows it, for a class whose device is gpu. Required if there are several.",
)
neuron_core_option = option(
    "--neuron-core",
    type=click.IntRange(0),
    metavar="N",
    help="The Neuron core to run on, for a class whose device is neuron. Required if there are several.",
)
json_option = option("--json", "as_json", is_flag=True, help="Print one JSON value.")
pull_option = option(
    "--pull",
    is_flag=True,
    help="Download a model that is not on this machine, as `embedctl model pull` does. Default: refuse to start.",
)
pooling_option = option(
    "--pooling",
    type=click.Choice(POOLINGS),
    help="How a model without modules of its own makes one vector of a text, as its authors say. Default: the setting "
    "of its entry.",
)
log_level_option = option(
    "--log-level",
    type=click.Choice(("debug", "info", "warning", "error")),
    default="info",
    show_default=True,
    help="The lowest level to log.",
)


def settings_and_class(hardware: str | None, default: str) -> tuple[Settings, str]:
    """The settings, and the name of the class that `--class` or they mean; the default for `auto`."""
    settings = load_settings(hardware=hardware)
    return settings, default if settings.hardware == "auto" else settings.hardware


def log_plainly() -> None:
    """Log this package's messages to standard error as they are: they are what the command says of its progress."""
    logging.basicConfig(format="%(message)s")
    for ours in ("embedctl_config", "embedctl_workers"):
        logging.getLogger(ours).setLevel(logging.INFO)


def plural(count: int, what: str) -> str:
    """A number of things, for people."""
    return f"{count} {what}" + ("s" if count != 1 else "")


def with_pooling(settings: Settings, models: Iterable[str], pooling: Any) -> Settings:
    """The settings with this value of `--pooling` for these models; None: as they are."""
    if pooling is None:
        return settings
    entries = {name: replace(settings.models.get(name, ModelEntry()), pooling=pooling) for name in models}
    return settings.replace(models={**settings.models, **entries})
