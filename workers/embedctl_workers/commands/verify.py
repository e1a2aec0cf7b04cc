"""`embedctl model verify`: the gate of a worker's start and a short benchmark, on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from embedctl_config.command_group import option
from embedctl_config.errors import ExitStatus, OutputError
from embedctl_config.settings import Settings
from embedctl_workers.commands.options import (
    class_option,
    cpus_option,
    gpu_option,
    json_option,
    log_plainly,
    neuron_core_option,
    settings_and_class,
)
from embedctl_workers.machine import devices
from embedctl_workers.machine.discovery import choose_accelerator
from embedctl_workers.models.cache import cache_folder


@click.command()
@click.argument("model")
@class_option("cpu")
@cpus_option
@gpu_option
@neuron_core_option
@option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Save the report here, as JSON. Default: a file in the cache folder; its name is printed at the end.",
)
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    model: str,
    hardware: str | None,
    cpus: str | None,
    gpu: str | None,
    neuron_core: int | None,
    report: Path | None,
    *,
    as_json: bool,
) -> None:
    """Check MODEL's vectors and measure its speed on this machine.

    Loads MODEL as a worker would and compares its vectors with those of torch in fp32. Takes about half a minute, or
    longer if something must be built first. Nothing else should run on the device meanwhile. Exits with 65 if a worker
    would refuse to start.
    """
    log_plainly()
    settings, name = settings_and_class(hardware, "cpu")
    accelerator = choose_accelerator(name, settings.hardware_class(name).device, gpu=gpu, neuron_core=neuron_core)
    pinned = devices.pin(cpus, accelerator=accelerator)
    # Only now: this imports libraries that size their thread pools when they are loaded.
    from embedctl_workers.measuring.verification import verify_model

    found = verify_model(settings, name, model, pinned)
    facts = found.as_json()
    click.echo(json.dumps(facts) if as_json else str(found))
    path = report or _kept(settings, name, model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"the report can't be saved in {path}: {error}") from error
    click.echo(f"saved: {path}", err=True)
    ctx.exit(ExitStatus.SUCCESS if found.passed else ExitStatus.INACCURATE)


def _kept(settings: Settings, hardware: str, model: str) -> Path:
    """The file of the last report on a model and a class: in the cache folder, which workers can write to anyway."""
    label = re.sub(r"[^\w.-]+", "-", model).strip("-")
    return cache_folder(settings) / "reports" / f"verify-{hardware}-{label}.json"
