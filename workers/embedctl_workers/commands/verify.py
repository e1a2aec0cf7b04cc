"""`embedctl model verify`: the gate of a worker's start and a short benchmark, on this machine."""

from __future__ import annotations

import json

import click

from embedctl_config.errors import ExitStatus
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


@click.command()
@click.argument("model")
@class_option("cpu")
@cpus_option
@gpu_option
@neuron_core_option
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
    click.echo(json.dumps(found.as_json()) if as_json else str(found))
    ctx.exit(ExitStatus.SUCCESS if found.passed else ExitStatus.INACCURATE)
