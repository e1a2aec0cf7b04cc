"""AWS Neuron's runtime: its presence, the device at hand, and the meaning of its errors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from embedctl_config.errors import DeviceLost, MissingExtra, SettingsError, WorkerError
from embedctl_workers.redaction import first_line

#: The packages of the runtime and of the compiler.
RUNTIME, COMPILER = "torch-neuronx", "neuronx-cc"
#: The instance families that traces can be built for, by the compiler's names.
TARGETS = ("inf2", "trn1", "trn2")
#: The families whose logical cores are made of several physical ones.
_GROUPED = ("trn2",)
#: The runtime's variable for the number of physical cores that make a logical one, and its values.
LOGICAL_CORES = "NEURON_LOGICAL_NC_CONFIG"
_LOGICAL_CORES, _USUAL_CORES = ("1", "2"), "2"
_IMAGE = "use AWS' image pytorch-inference-neuronx with torch_neuronx.trace (docs/neuron.md)"
#: The version of AWS' placeholder on PyPI, which keeps the name from others: its import raises.
_PLACEHOLDER = "1.0"
_DEVICES = Path("/dev")
_PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")
_FAMILY = re.compile(rf"({'|'.join(TARGETS)})[a-z]*\.")
#: The statuses after which a core does nothing more for this process, from nrt_status.h of AWS' Neuron SDK. After a
#: timeout or a hardware error, an "execution unit" refuses all further work until the process starts anew
#: (neuron-runtime/api/nrt-async-api-overview.rst there).
_LOST = {
    5: "NRT_TIMEOUT",
    6: "NRT_HW_ERROR",
    101: "NRT_EXEC_UNIT_UNRECOVERABLE",
    1201: "NRT_EXEC_HW_ERR_HBM_UE",
    1202: "NRT_EXEC_HW_ERR_NC_UE",
    1203: "NRT_EXEC_HW_ERR_DMA_ABORT",
}
#: As torch_neuronx words it: `nrt_execute status=101 message="…"`.
_STATUS = re.compile(r"\bnrt_\w+ status=(\d+)")
_FILE = "traces.json"


def version_of(package: str) -> str:
    """The installed version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def load_runtime() -> Any:  # torch_neuronx has no types
    """Import the `torch_neuronx` that has `trace`. After that, `torch.jit.load` can load traces.

    MissingExtra if the package is not installed; a WorkerError, which says what to install instead, if it can't be
    used.
    """
    name = f"{RUNTIME} {version_of(RUNTIME)}".rstrip()
    try:
        # Importing is the only test: the placeholder is found like any other package.
        runtime = import_module("torch_neuronx")
    except Exception as error:  # a package of that name may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "torch_neuronx":
            raise MissingExtra("neuron", "backend 'neuron'") from error
        if version_of(RUNTIME) == _PLACEHOLDER:
            why = f"{name} is PyPI's placeholder, and the real one comes from AWS' own index"
        else:
            why = _wrong_torch(name) or f"{name} can't be imported ({first_line(error)})"
        raise WorkerError(f"{why}: {_IMAGE}") from error
    if not hasattr(runtime, "trace"):
        why = f"{name} is TorchNeuron, another product of that name, which has no torch_neuronx.trace"
        raise WorkerError(f"{why}: {_IMAGE}")
    if why := _wrong_torch(name):
        raise WorkerError(f"{why}: {_IMAGE}")
    return runtime


def require_device() -> None:
    """Check that there is a Neuron device; a WorkerError if there is none."""
    if not any(_DEVICES.glob("neuron[0-9]*")):
        raise WorkerError(
            f"there is no Neuron device here ({_DEVICES}/neuron0): use an Inf2, Trn1 or Trn2 instance with AWS' driver "
            "(aws-neuronx-dkms), or build for one with `embedctl model build MODEL --target inf2`"
        )


def machine_target() -> str:
    """The target of this machine's traces, one of :data:`TARGETS`; a WorkerError if its name is not an instance's."""
    try:
        product = _PRODUCT.read_text(encoding="utf-8").strip()
    except OSError:
        product = ""
    family = _FAMILY.match(product)
    if family is None:
        raise WorkerError(
            f"this machine's name is not that of an Inf2, Trn1 or Trn2 instance ({product or 'it has none'}): set the "
            f"class's option target to one of {', '.join(TARGETS)}"
        )
    return family[1]


def core_flags(target: str) -> list[str]:
    """The compiler's flags for the logical cores that this process's runtime has.

    "You must compile your models to use the LNC configuration set by the Neuron Runtime environment variable"
    (about-neuron/arch/neuron-features/logical-neuroncore-config.rst in AWS' Neuron SDK). The other families have
    logical cores of one physical core, and their compiler refuses any other. A SettingsError if the variable is set to
    another number than the compiler takes.
    """
    if target not in _GROUPED:
        return []
    chosen = os.environ.get(LOGICAL_CORES) or _USUAL_CORES
    if chosen not in _LOGICAL_CORES:
        raise SettingsError(f"{LOGICAL_CORES} {chosen!r} is neither {' nor '.join(_LOGICAL_CORES)}")
    return ["--logical-nc-config", chosen]


def device_lost(error: Exception) -> DeviceLost | None:
    """The error to raise if an error of the runtime means that this process has lost the core; otherwise None."""
    text = str(error)
    for status in (int(found) for found in _STATUS.findall(text)):
        if status in _LOST:
            return DeviceLost(f"the Neuron core is lost: {_LOST[status]} ({status})")
    for status, name in _LOST.items():
        if re.search(rf"\b{name}\b", text):
            return DeviceLost(f"the Neuron core is lost: {name} ({status})")
    return None


def _wrong_torch(name: str) -> str:
    """Why PyTorch does not match torch_neuronx, for example after something upgraded it; empty if it matches."""
    runtime, torch = version_of(RUNTIME), version_of("torch")
    if not runtime or not torch or _release(runtime) == _release(torch):
        return ""
    return f"{name} needs PyTorch {_release(runtime)} (at most 2.9, for torch_neuronx.trace), and {torch} is installed"


def _release(version: str) -> str:
    """`2.9` of `2.9.0.2.13.24727+8e870898`: the version of a torch_neuronx begins with that of its PyTorch."""
    return ".".join(version.partition("+")[0].split(".")[:2])


@dataclass(frozen=True, slots=True)
class Traces:
    """The traces in a folder: each takes `inputs` in order, and `batch` rows; `buckets`, their lengths, ascend."""

    inputs: Sequence[str]
    buckets: Sequence[int]
    batch: int

    @classmethod
    def read(cls, folder: Path) -> Traces:
        return cls(**json.loads((folder / _FILE).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")


def trace_file(folder: Path, bucket: int) -> Path:
    return folder / f"bucket-{bucket}.pt"
