"""The traces that a machine runs: their recipe, and how they are found or built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embedctl_config.errors import MissingExtra, ModelError, SettingsError
from embedctl_workers.backends.neuron.options import TraceOptions
from embedctl_workers.backends.neuron.runtime import (
    COMPILER,
    RUNTIME,
    TARGETS,
    core_flags,
    machine_target,
    require_device,
    version_of,
)
from embedctl_workers.backends.onnx.recipe import OWN
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact, ArtifactStore, Wanted
from embedctl_workers.models.build_process import request_for, run_build
from embedctl_workers.models.builders import USUAL, BuildOptions
from embedctl_workers.models.files import ModelFiles

#: The kind of artefact. The backend that runs it has the same name.
NEURON = "neuron"


def wanted(files: ModelFiles, options: TraceOptions, target: str) -> Wanted:
    """The artefact for a target; MissingExtra if torch_neuronx is not installed. Raises as :func:`core_flags`."""
    runtime = version_of(RUNTIME)
    if not runtime:
        raise MissingExtra("neuron", "backend 'neuron'")
    recipe = {"kind": NEURON, **options.recipe, "target": target, RUNTIME: runtime, COMPILER: version_of(COMPILER)}
    recipe["flags"] = " ".join([*options.flags, *core_flags(target)])
    return Wanted(files.fingerprint, recipe)


def build(files: ModelFiles, host: Host, how: BuildOptions) -> Artifact:
    """See :class:`embedctl_workers.models.builders.Builder`; the target `neuron` is Inf2."""
    if how.exporter != OWN:
        raise SettingsError(f"backend {NEURON!r} traces the model itself: leave --exporter {how.exporter} out")
    target = TARGETS[0] if how.target == NEURON else how.target
    chosen = TraceOptions.parse(how.options)
    return artifact_for(files, host, chosen, replace(how, target=target))


def artifact_for(files: ModelFiles, host: Host, options: TraceOptions, how: BuildOptions = USUAL) -> Artifact:
    """An artefact from the cache, or built now in a separate process; of `how`, the target, the revision and `force`
    count.

    The target is one of :data:`~.runtime.TARGETS`; an empty one stands for this machine's device. Raises WorkerError if
    it has none, and ModelError if it can't be built, or if the cache lacks it and `host.build` is False.
    """
    if not how.target:
        require_device()
    store, want = ArtifactStore(host.cache), wanted(files, options, how.target or options.target or machine_target())
    if not how.force and (found := store.find(want)):
        return found
    if not host.build:
        raise ModelError(
            f"model {files.name!r} has no artefact for backend {NEURON!r} in {host.cache}, and --no-build forbids "
            f"building it: run `embedctl model build {files.name} --target {want.recipe['target']}`, or "
            f"copy {want.name} from a machine that has it"
        )
    if find_spec("sentence_transformers") is None:
        raise MissingExtra("neuron", "building an artefact")

    def fill(folder: Path) -> Mapping[str, Any]:
        more = {
            "options": {**asdict(options), "buckets": ",".join(map(str, options.buckets))},
            "flags": want.recipe["flags"].split(),
            "target": want.recipe["target"],
            "elsewhere": bool(how.target),
        }
        request = request_for(files, host, NEURON, folder, revision=how.revision, **more)
        return run_build("embedctl_workers.building.neuron", request)

    return store.build(want, fill, force=how.force)
