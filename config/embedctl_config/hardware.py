"""Hardware classes: named ways to encode, each with its queues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, get_args

Device = Literal["cpu", "gpu", "neuron"]
Precision = Literal["fp32", "fp16", "int8"]

DEVICES: tuple[str, ...] = get_args(Device)
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """How far vectors may be from those of torch in fp32.

    Attributes:
        max_abs_error: largest difference of a component, of vectors of unit length.
        min_cosine: of the worst text.
        mean_cosine: over all texts.
    """

    max_abs_error: float = math.inf
    min_cosine: float = -1.0
    mean_cosine: float = -1.0

    def stated(self) -> dict[str, float]:
        """The bounds that say anything, by name."""
        return {name: value for name, value in asdict(self).items() if value != getattr(_UNBOUNDED, name)}


_UNBOUNDED = Thresholds()
#: What a job's vectors promise. `fp16` stands for 16 bits, be it fp16 or bf16: a backend takes what it measured to be
#: closer. The int8 artefact of a model may state bounds of its own.
THRESHOLDS: Mapping[str, Thresholds] = {
    "fp32": Thresholds(max_abs_error=1e-4),
    "fp16": Thresholds(min_cosine=0.999),
    "int8": Thresholds(min_cosine=0.95, mean_cosine=0.98),
}


@dataclass(frozen=True, slots=True)
class HardwareClass:
    """How workers of this class encode.

    Attributes:
        device: the kind of device that each worker is pinned to.
        backend: an alias known to `embedctl_workers.backends`.
        precision: what its vectors promise.
        prefetch: chunks a worker holds at once: one encoding, the others being prepared.
        token_budget: upper bound of rows × longest row of a batch; 0: as `model tune` found, or the backend's own.
        models: the models that a worker of this class serves unless told otherwise.
        options: the backend's own settings.
        max_abs_error: your own bound for the accuracy gate in place of the precision's, named in every result; 0: none.
        min_cosine: as `max_abs_error`, for the cosine of the worst text.
        mean_cosine: as `max_abs_error`, for the mean cosine.
    """

    device: Device = "cpu"
    backend: str = "torch"
    precision: Precision = "fp32"
    prefetch: int = 2
    token_budget: int = 0
    models: tuple[str, ...] = ()
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    max_abs_error: float = 0.0
    min_cosine: float = 0.0
    mean_cosine: float = 0.0

    @property
    def overrides(self) -> Mapping[str, float]:
        """The bounds that this class sets itself."""
        own = {name: getattr(self, name) for name in ("max_abs_error", "min_cosine", "mean_cosine")}
        return {name: value for name, value in own.items() if value}

    @property
    def overrides_in_words(self) -> str:
        """The same for people and for results, such as `min_cosine 0.9`; empty where there are none."""
        return ", ".join(f"{name} {value:g}" for name, value in self.overrides.items())

    def thresholds(self, stated: Thresholds | None = None) -> Thresholds:
        """What its workers are held to: its own bounds, else an int8 artefact's, else the precision's."""
        promised = THRESHOLDS[self.precision]
        return replace(stated if stated and self.precision == "int8" else promised, **self.overrides)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Where a model comes from, under the name that jobs and queues use.

    Attributes:
        source: a folder, an installed model package or a hub id; the entry's own name where empty.
        revision: the hub revision to load; the cache's `main` where empty.
        fingerprint: the only model fingerprint that workers may serve under this name; any where empty.
    """

    source: str = ""
    revision: str = ""
    fingerprint: str = ""


#: The hardware classes that exist without any configuration.
SHIPPED_CLASSES: Mapping[str, HardwareClass] = {
    "cpu": HardwareClass(),
    "cpu-int8": HardwareClass(backend="onnx-int8", precision="int8"),
    # One chunk encoding, one whose last results are awaited, and two being prepared.
    "gpu": HardwareClass(device="gpu", backend="torch-gpu", precision="fp16", prefetch=4),
    "gpu-tensorrt": HardwareClass(device="gpu", backend="tensorrt", precision="fp16", prefetch=4),
    # Two feeding threads a core, and two that prepare.
    "neuron": HardwareClass(device="neuron", backend="neuron", precision="fp16", prefetch=4),
}
