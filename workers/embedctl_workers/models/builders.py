"""The table of builders: which backends run an artefact, and what builds it. Imports nothing that starts threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from embedctl_config.errors import SettingsError

if TYPE_CHECKING:
    from embedctl_workers.machine.host import Host
    from embedctl_workers.models.artifacts import Artifact
    from embedctl_workers.models.files import ModelFiles

#: Backend → `module:function`; the function is a :data:`Builder`.
BUILDERS = {
    "int8": "embedctl_workers.backends.int8:build",
    "neuron": "embedctl_workers.backends.neuron.recipe:build",
    "onnx": "embedctl_workers.backends.onnx.recipe:build_onnx",
    "onnx-int8": "embedctl_workers.backends.onnx.recipe:build_onnx_int8",
    "tensorrt": "embedctl_workers.backends.tensorrt.recipe:build",
}


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How an artefact is to be built."""

    #: those of the hardware class, as :meth:`Backend.load` gets them
    options: Mapping[str, Any] = field(default_factory=dict)
    exporter: str = "own"  #: makes the graph; one of :data:`embedctl_workers.backends.onnx.recipe.EXPORTERS`
    revision: str = ""  #: the model's revision in the hub, for the manifest
    target: str = ""  #: the kind of device to build for; empty for the device of this machine
    force: bool = False  #: build the artefact even if it is in the cache


#: It builds for this machine's device, unless the cache has the artefact.
USUAL = BuildOptions()
#: Finds an artefact of a model in the cache, or builds it. It raises SettingsError if the backend does not know the
#: exporter or the target, ModelError if the artefact can't be built, and MissingExtra if a package that builds it is
#: not installed.
Builder = Callable[["ModelFiles", "Host", BuildOptions], "Artifact"]


def require_builder(hardware: str, backend: str) -> str:
    """Where the builder for a backend is, as in :data:`BUILDERS`; a SettingsError if the backend runs no artefact."""
    if backend not in BUILDERS:
        raise SettingsError(
            f"class {hardware} runs backend {backend!r}, which needs no build: choose a class with backend "
            f"{' or '.join(BUILDERS)}"
        )
    return BUILDERS[backend]


def load_builder(hardware: str, backend: str) -> Builder:
    """The builder for a backend; this imports the backend's runtime. Raises as :func:`require_builder`."""
    module, _, function = require_builder(hardware, backend).partition(":")
    builder: Builder = getattr(import_module(module), function)
    return builder
