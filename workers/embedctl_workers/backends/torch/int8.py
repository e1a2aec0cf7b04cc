"""sentence-transformers models in int8 on the CPU, by the packed engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from embedctl_config.hardware import ModelEntry, Thresholds
from embedctl_workers.arrays.padding import Padding
from embedctl_workers.backends.base import Reference
from embedctl_workers.backends.torch.backend import CpuEngine, TorchBackend
from embedctl_workers.backends.torch.packed.fused import Int8Library, fits_int8, int8_layers
from embedctl_workers.backends.torch.packed.kernels import Kernels, load_kernels
from embedctl_workers.backends.torch.packed.layers import LayerKind
from embedctl_workers.backends.torch.packed.weights import Weights
from embedctl_workers.machine.host import Host
from embedctl_workers.models.compiling import NOT_COMPILED
from embedctl_workers.models.files import ModelFiles, resolve_model

#: What this engine is held to, instead of int8's wider bounds.
BOUNDS = Thresholds(min_cosine=0.98, mean_cosine=0.99)
#: The model types of configurations that :func:`.packed.packable.packable` may take.
_FAMILIES = {"bert", "roberta", "xlm-roberta", "camembert", "distilbert"}
_OTHER_FAMILY = "the model is not of the BERT family"
#: The compiler's, beside the usual ones.
FLAGS: tuple[str, ...] = ()


class NotInt8(Exception):
    """Raised when the packed engine can't run this model in int8 on this machine; the message says why."""


class TorchInt8Backend(TorchBackend):
    """As :class:`TorchBackend`, with the layers' products, and attention, in int8; raises NotInt8 or ModelError."""

    OPTIONS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, files: ModelFiles, host: Host) -> None:
        _refuse_others(files)
        self._library = _library(host)
        super().__init__(files, host)
        self.reference = Reference(files, BOUNDS)

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        return cls(resolve_model(model, entry, plain=False), host)

    def _layers(self, weights: Weights, kernels: Kernels, host: Host) -> LayerKind:
        if not fits_int8(weights):
            raise NotInt8(
                "the model's layers have sizes or an activation that the packed engine does not compute in int8"
            )
        return int8_layers(self._library)

    def _padded(self, padding: Padding) -> CpuEngine:
        raise NotInt8(_OTHER_FAMILY)


def compile_all(host: Host) -> None:
    """Compile what the engine needs into the cache; raises one of :data:`NOT_COMPILED` if that fails."""
    Int8Library(host, FLAGS)
    load_kernels(host)


def _refuse_others(files: ModelFiles) -> None:
    """Refuse a model (NotInt8) by its configuration alone, before its weights are read, where that tells enough."""
    try:
        kind = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if kind not in _FAMILIES:
        raise NotInt8(_OTHER_FAMILY)


def _library(host: Host) -> Int8Library:
    try:
        return Int8Library(host, FLAGS)
    except NOT_COMPILED as error:
        raise NotInt8(str(error)) from error
