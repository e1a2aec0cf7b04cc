"""Options that the commands of this package share. Imports nothing that starts threads: pinning comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

LOG_LEVELS = ("debug", "info", "warning", "error")

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def class_option(default: str) -> _Decorator:
    """`--class`, as `hardware`.

    Args:
        default: the class that the setting `auto` means here.
    """
    return click.option(
        "--class",
        "hardware",
        envvar="EMBEDCTL_HARDWARE",
        show_envvar=True,
        help=f"The hardware class. Default: the setting, or {default} if that is auto.",
    )


cpus_option = click.option(
    "--cpus", envvar="EMBEDCTL_CPUS", show_envvar=True, help="CPUs to run on, such as 0-3. Default: all."
)
gpu_option = click.option(
    "--gpu",
    metavar="UUID|INDEX",
    envvar="EMBEDCTL_GPU",
    show_envvar=True,
    help="The GPU to run on, as nvidia-smi shows it, for a class whose device is gpu. Required if there are several.",
)
neuron_core_option = click.option(
    "--neuron-core",
    type=click.IntRange(0),
    metavar="N",
    envvar="EMBEDCTL_NEURON_CORE",
    show_envvar=True,
    help="The Neuron core to run on, for a class whose device is neuron. Required if there are several.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, envvar="EMBEDCTL_JSON", show_envvar=True, help="Print one JSON value."
)
pull_option = click.option(
    "--pull",
    is_flag=True,
    envvar="EMBEDCTL_PULL",
    show_envvar=True,
    help="Download a model that is not on this machine, as `embedctl model pull` does. Default: refuse to start.",
)
log_level_option = click.option(
    "--log-level",
    envvar="EMBEDCTL_LOG_LEVEL",
    type=click.Choice(LOG_LEVELS),
    default="info",
    show_default=True,
    show_envvar=True,
    help="The lowest level to log.",
)
