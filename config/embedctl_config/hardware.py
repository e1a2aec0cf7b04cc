"""Hardware classes: named ways to encode, each with its queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Device = Literal["cpu"]
Precision = Literal["fp32", "fp16", "int8"]

DEVICES: tuple[str, ...] = get_args(Device)
#: What a job's vectors promise against torch fp32: max abs error 1e-4, min cosine 0.999, the model's own bound.
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True, slots=True)
class HardwareClass:
    """How workers of this class encode.

    Attributes:
        device: the kind of device that each worker is pinned to.
        backend: an alias known to `embedctl_workers.backends`.
        precision: what its vectors promise.
        prefetch: chunks a worker holds at once: one encoding, the others being prepared.
        token_budget: upper bound of rows × longest row of a batch, in tokens.
        models: the models that a worker of this class serves unless told otherwise.
        options: the backend's own settings.
    """

    device: Device = "cpu"
    backend: str = "torch"
    precision: Precision = "fp32"
    prefetch: int = 2
    token_budget: int = 1024
    models: tuple[str, ...] = ()
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)


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
SHIPPED_CLASSES: Mapping[str, HardwareClass] = {"cpu": HardwareClass()}
