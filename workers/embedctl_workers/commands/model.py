"""`embedctl model`: builds artefacts, and groups the other commands.

Imports nothing that starts threads: pinning comes first.
"""

from __future__ import annotations

import json

import click

from embedctl_config.command_group import CommandGroup, option
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import Device
from embedctl_workers.commands.listing import artifact_facts, list_models, show, summary
from embedctl_workers.commands.options import (
    class_option,
    cpus_option,
    gpu_option,
    json_option,
    log_plainly,
    neuron_core_option,
    settings_and_class,
)
from embedctl_workers.commands.pull import pull
from embedctl_workers.commands.quality import quality
from embedctl_workers.commands.tune import tune
from embedctl_workers.commands.verify import verify
from embedctl_workers.machine import devices
from embedctl_workers.machine.devices import Accelerator
from embedctl_workers.machine.discovery import choose_accelerator
from embedctl_workers.models.builders import require_builder

#: `embedctl_workers.backends.onnx.recipe.EXPORTERS`, which can't be imported before pinning.
EXPORTERS = ("own", "optimum")
#: Devices to build for on any machine: the TARGETS of `backends.neuron.runtime`, and `neuron` for the first of them.
TARGETS = ("neuron", "inf2", "trn1", "trn2")


@click.group("embedctl model", cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Download, build, show, tune and verify models on this machine.

    For some classes, a worker runs an artefact that is built from the model, such as an ONNX graph in fp32 or int8.
    """


for _command in (list_models, show, pull, quality, tune, verify):
    main.add_command(_command)


@main.command()
@click.argument("model")
@class_option("cpu-int8")
@cpus_option
@gpu_option
@neuron_core_option
@option(
    "--target",
    type=click.Choice(TARGETS),
    help="The AWS instance family to build for, if it is not this machine's; neuron means inf2. Implies --class "
    "neuron. Default: this machine's.",
)
@option(
    "--exporter",
    type=click.Choice(EXPORTERS),
    default="own",
    show_default=True,
    help="The exporter of the graph. optimum needs the extra `optimum` in a separate environment. Workers run only "
    "graphs that were exported with own.",
)
@option("--force", is_flag=True, help="Build again, even if the artefact exists.")
@json_option
def build(
    model: str,
    hardware: str | None,
    cpus: str | None,
    gpu: str | None,
    neuron_core: int | None,
    target: str | None,
    exporter: str,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Build the artefact of MODEL, unless it exists, and print its folder.

    The artefact is what workers of the class run. A worker builds it at its start, unless started with --no-build. You
    may copy the folder into the cache of a machine with the same kind of device. That machine then needs none of the
    packages that build it.
    """
    settings, name = settings_and_class(hardware or ("neuron" if target else None), "cpu-int8")
    hardware_class = settings.hardware_class(name)
    log_plainly()
    require_builder(name, hardware_class.backend)
    accelerator = None if target else _accelerator(name, hardware_class.device, gpu, neuron_core)
    pinned = devices.pin(cpus, accelerator=accelerator)
    # Only now: these import libraries that size their thread pools when they are loaded.
    from embedctl_workers.machine.host import Host
    from embedctl_workers.models.builders import BuildOptions, load_builder
    from embedctl_workers.models.cache import cache_folder
    from embedctl_workers.models.files import DENSE_ALONE, resolve_model

    build_artifact = load_builder(name, hardware_class.backend)
    entry = settings.models.get(model)
    artifact = build_artifact(
        resolve_model(model, entry, plain=hardware_class.backend in DENSE_ALONE),
        Host(pinned.threads, cache_folder(settings), places=pinned.places),
        BuildOptions(hardware_class.options, exporter, entry.revision if entry else "", target or "", force),
    )
    if as_json:
        click.echo(json.dumps(artifact_facts(artifact)))
        return
    click.echo(summary(artifact.manifest), err=True)
    click.echo(str(artifact.folder))


def _accelerator(hardware: str, device: Device, gpu: str | None, neuron_core: int | None) -> Accelerator | None:
    """The accelerator to build on; None for a class on CPUs."""
    try:
        return choose_accelerator(hardware, device, gpu=gpu, neuron_core=neuron_core)
    except SettingsError as error:
        if device != "neuron":
            raise
        raise SettingsError(f"{error}; --target builds without one") from error


if __name__ == "__main__":
    main(prog_name="embedctl model")
