"""`embedctl model`: builds and shows artefacts. Imports nothing that starts threads: pinning comes first."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedctl_config.command_group import CommandGroup
from embedctl_config.errors import ModelError, ModelNotFound, SettingsError
from embedctl_config.hardware import Device
from embedctl_config.settings import Settings, load_settings
from embedctl_workers.commands.options import class_option, cpus_option, gpu_option, json_option, neuron_core_option
from embedctl_workers.commands.tune import tune
from embedctl_workers.commands.verify import verify
from embedctl_workers.machine import devices
from embedctl_workers.machine.devices import Accelerator
from embedctl_workers.machine.discovery import choose_accelerator
from embedctl_workers.models.builders import require_builder

if TYPE_CHECKING:
    from embedctl_workers.models.artifacts import Artifact, ArtifactStore

#: `embedctl_workers.backends.onnx.recipe.EXPORTERS`, which can't be imported before pinning.
EXPORTERS = ("own", "optimum")
#: Devices to build for on any machine: the TARGETS of `backends.neuron.runtime`, and `neuron` for the first of them.
TARGETS = ("neuron", "inf2", "trn1", "trn2")
_NOT_MEASURED = "not measured: built without the device"


@click.group("embedctl model", cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Build, show, tune and verify models on this machine.

    For some classes, a worker runs an artefact that is built from the model, such as an ONNX graph in fp32 or int8.
    """


main.add_command(verify)
main.add_command(tune)


@main.command()
@click.argument("model")
@class_option("cpu-int8")
@cpus_option
@gpu_option
@neuron_core_option
@click.option(
    "--target",
    type=click.Choice(TARGETS),
    envvar="EMBEDCTL_TARGET",
    show_envvar=True,
    help="The AWS instance family to build for, if it is not this machine's; neuron means inf2. Implies --class "
    "neuron. Default: this machine's.",
)
@click.option(
    "--exporter",
    type=click.Choice(EXPORTERS),
    default="own",
    show_default=True,
    envvar="EMBEDCTL_EXPORTER",
    show_envvar=True,
    help="The exporter of the graph. optimum needs the extra `optimum` in a separate environment. Workers run only "
    "graphs that were exported with own.",
)
@click.option(
    "--force", is_flag=True, envvar="EMBEDCTL_FORCE", show_envvar=True, help="Build again, even if the artefact exists."
)
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
    settings = load_settings(hardware=hardware or ("neuron" if target else None))
    name = "cpu-int8" if settings.hardware == "auto" else settings.hardware
    hardware_class = settings.hardware_class(name)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("embedctl_workers").setLevel(logging.INFO)
    require_builder(name, hardware_class.backend)
    accelerator = None if target else _accelerator(name, hardware_class.device, gpu, neuron_core)
    pinned = devices.pin(cpus, accelerator=accelerator)
    # Only now: these import libraries that size their thread pools when they are loaded.
    from embedctl_workers.machine.host import Host
    from embedctl_workers.models.builders import BuildOptions, load_builder
    from embedctl_workers.models.cache import cache_folder
    from embedctl_workers.models.files import resolve_model

    build_artifact = load_builder(name, hardware_class.backend)
    entry = settings.models.get(model)
    artifact = build_artifact(
        resolve_model(model, entry),
        Host(pinned.threads, cache_folder(settings)),
        BuildOptions(hardware_class.options, exporter, entry.revision if entry else "", target or "", force),
    )
    if as_json:
        click.echo(json.dumps(_facts(artifact)))
        return
    click.echo(_summary(artifact.manifest), err=True)
    click.echo(str(artifact.folder))


def _accelerator(hardware: str, device: Device, gpu: str | None, neuron_core: int | None) -> Accelerator | None:
    """The accelerator to build on; None for a class on CPUs."""
    try:
        return choose_accelerator(hardware, device, gpu=gpu, neuron_core=neuron_core)
    except SettingsError as error:
        if device != "neuron":
            raise
        raise SettingsError(f"{error}; --target builds without one") from error


@main.command("list")
@json_option
def list_artifacts(*, as_json: bool) -> None:
    """List artefacts and their sizes, and those that can no longer be used."""
    for folder, found in _store(load_settings()).all():
        if isinstance(found, ModelError):
            click.echo(json.dumps({"folder": str(folder), "problem": str(found)}) if as_json else f"unusable: {found}")
        elif as_json:
            click.echo(json.dumps(_facts(found)))
        else:
            click.echo(_summary(found.manifest))


@main.command()
@click.argument("model", metavar="MODEL|FOLDER")
@json_option
def show(model: str, *, as_json: bool) -> None:
    """Show the manifests of all artefacts of MODEL, or the manifest in FOLDER."""
    found = list(_find(model, load_settings()))
    if not found:
        raise ModelNotFound(f"nothing is built of model {model!r} here: run `embedctl model build {model}`")
    for artifact in found:
        if as_json:
            click.echo(json.dumps(_facts(artifact)))
        else:
            click.echo(f"{'folder':<24} {artifact.folder}")
            for name, value in _rows(artifact.manifest):
                click.echo(f"{name:<24} {value}")
            click.echo()


def _find(model: str, settings: Settings) -> Iterator[Artifact]:
    from embedctl_workers.models.artifacts import MANIFEST, read_artifact

    folder = Path(model)
    if (folder / MANIFEST).is_file():
        yield read_artifact(folder)
        return
    for path, found in _store(settings).all():
        if isinstance(found, ModelError):
            click.echo(f"unusable: {found}", err=True)
        elif model in (found.manifest["model"]["name"], found.manifest["fingerprint"], path.name):
            yield found


def _store(settings: Settings) -> ArtifactStore:
    from embedctl_workers.models.artifacts import ArtifactStore
    from embedctl_workers.models.cache import cache_folder

    return ArtifactStore(cache_folder(settings))


def _facts(artifact: Artifact) -> dict[str, Any]:
    return {"folder": str(artifact.folder), "size": artifact.size, **artifact.manifest}


def _summary(manifest: Mapping[str, Any]) -> str:
    """One line about an artefact."""
    size = sum(facts["size"] for facts in manifest["files"].values())
    return (
        f"{manifest['model']['name']}  {manifest['fingerprint'][:12]}  {manifest['engine']}  "
        f"{size / 1e6:.1f} MB of {manifest['model']['weights_bytes'] / 1e6:.1f}  {_measured(manifest)}"
    )


def _measured(manifest: Mapping[str, Any]) -> str:
    accuracy, rate = manifest["accuracy"], manifest["rate"]
    if accuracy is None or rate is None:
        return _NOT_MEASURED
    return (
        f"cosine min {accuracy['min_cosine']:.4f} mean {accuracy['mean_cosine']:.4f}  "
        f"{rate['sentences_per_s']:.0f} texts/s on {rate.get('device') or str(rate['threads']) + ' threads'}"
    )


def _rows(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The lines of a manifest: names of nested facts are joined; counts and flat lists are in one line."""
    for name, value in facts.items():
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            yield from _rows(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            yield f"{prefix}{name}", ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
        else:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: object) -> str:
    if value is None:
        return _NOT_MEASURED
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main(prog_name="embedctl model")
