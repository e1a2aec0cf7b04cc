"""Hardware classes: named ways to encode, each with its queues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, get_args

Device = Literal["cpu", "gpu", "neuron"]
Precision = Literal["fp32", "fp16", "int8"]
Pooling = Literal["mean", "cls", "last"]

#: The most workers on a device.
MOST_WORKERS = 64
DEVICES: tuple[str, ...] = get_args(Device)
PRECISIONS: tuple[str, ...] = get_args(Precision)
POOLINGS: tuple[str, ...] = get_args(Pooling)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """How far vectors may differ from those of torch in fp32.

    Attributes:
        max_abs_error: largest difference of a component between vectors of unit length.
        min_cosine: smallest cosine of any text.
        mean_cosine: smallest mean of the cosines of all texts.
    """

    max_abs_error: float = math.inf
    min_cosine: float = -1.0
    mean_cosine: float = -1.0

    def stated(self) -> dict[str, float]:
        """The bounds that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value != getattr(_UNBOUNDED, name)}


_UNBOUNDED = Thresholds()
#: The bounds that each precision promises. `fp16` means 16 bits, either fp16 or bf16: a backend uses the one that it
#: measured to be closer. An int8 backend, or a model's int8 artefact, may state its own bounds.
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
        precision: the accuracy that the class promises for its vectors.
        prefetch: chunks that a worker holds at once: it encodes one and prepares the others.
        token_budget: maximum tokens in a batch, including any padding; 0: the backend's default.
        workers_per_device: workers of `embedctl up` on each GPU or set of CPUs; 0: those that `model tune` found, or 1.
        models: the models that a worker of this class serves if its command names no model.
        options: the backend's own settings.
        max_abs_error: your own bound for the accuracy gate, instead of the precision's; every result names it; 0: none.
        min_cosine: as `max_abs_error`, for the cosine of the worst text.
        mean_cosine: as `max_abs_error`, for the mean cosine.
    """

    device: Device = "cpu"
    backend: str = "torch"
    precision: Precision = "fp32"
    prefetch: int = 2
    token_budget: int = 0
    workers_per_device: int = 0
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
        """The same in words, for people and for results, such as `min_cosine 0.9`; empty if there are none."""
        return ", ".join(f"{name} {value:g}" for name, value in self.overrides.items())

    @property
    def stores_float16(self) -> bool:
        """Whether 16 bits hold what it promises of its vectors. A bound of its own on each component asks for 32."""
        return self.precision == "fp16" and not self.max_abs_error

    def thresholds(self, stated: Thresholds | None = None) -> Thresholds:
        """Its workers must meet its own bounds, else those that a backend states (if int8), else the precision's."""
        promised = THRESHOLDS[self.precision]
        return replace(stated if stated and self.precision == "int8" else promised, **self.overrides)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Where a model comes from, under the name that jobs and queues use.

    Attributes:
        source: a folder, an installed model package or a hub id; empty: the entry's own name.
        revision: the hub revision to load; empty: the cache's `main`.
        fingerprint: the only model fingerprint that workers may serve under this name; empty: any.
        pooling: how a model without modules makes one vector of a text: mean, cls or last; empty: its modules say it.
    """

    source: str = ""
    revision: str = ""
    fingerprint: str = ""
    pooling: Pooling | Literal[""] = ""


#: The hardware classes that exist without any configuration.
SHIPPED_CLASSES: Mapping[str, HardwareClass] = {
    "cpu": HardwareClass(),
    "cpu-bf16": HardwareClass(backend="torch-bf16", precision="fp16"),
    "cpu-int8": HardwareClass(backend="int8", precision="int8"),
    # One chunk encoding, one whose last results are awaited, and two being prepared.
    "gpu": HardwareClass(device="gpu", backend="torch-gpu", precision="fp16", prefetch=4),
    "gpu-tensorrt": HardwareClass(device="gpu", backend="tensorrt", precision="fp16", prefetch=4),
    # Two threads that feed the core, and two that prepare.
    "neuron": HardwareClass(device="neuron", backend="neuron", precision="fp16", prefetch=4),
}
