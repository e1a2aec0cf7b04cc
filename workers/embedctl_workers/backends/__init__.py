"""The backends, by alias. A backend is imported when a model is loaded into it."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING

from embedctl_config.errors import MissingExtra, SettingsError
from embedctl_workers.machine import teams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from embedctl_config.hardware import ModelEntry
    from embedctl_workers.backends.base import Backend
    from embedctl_workers.machine.host import Host

#: Alias → (module:class, the extra that installs its packages).
BACKENDS = {
    "dummy": ("embedctl_workers.backends.dummy:DummyBackend", ""),
    "int8": ("embedctl_workers.backends.int8:Int8Backend", "onnx"),
    "neuron": ("embedctl_workers.backends.neuron.backend:NeuronBackend", "neuron"),
    "onnx": ("embedctl_workers.backends.onnx.backend:OnnxBackend", "onnx"),
    "onnx-int8": ("embedctl_workers.backends.onnx.backend:OnnxInt8Backend", "onnx"),
    "tensorrt": ("embedctl_workers.backends.tensorrt.backend:TensorRTBackend", "tensorrt"),
    "torch": ("embedctl_workers.backends.torch.backend:TorchBackend", "torch"),
    "torch-bf16": ("embedctl_workers.backends.torch.backend:TorchBf16Backend", "torch"),
    "torch-gpu": ("embedctl_workers.backends.gpu.backend:TorchGpuBackend", "gpu"),
}
#: Those that compute on CPUs and import torch.
_ON_TORCH = ("torch", "torch-bf16")


def load_backend(
    alias: str,
    model: str,
    *,
    entry: ModelEntry | None,
    host: Host,
    options: Mapping[str, str | int | float | bool],
) -> Backend:
    """Load a model, which `entry` locates, by the name that jobs use, with the hardware class's options for this
    backend.

    Raises:
        SettingsError: there is no such backend, or it has no option of a given name.
        MissingExtra: packages that the backend needs are not installed.
        ModelError: the model can't be found or loaded.
    """
    if alias not in BACKENDS:
        close = difflib.get_close_matches(alias, BACKENDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SettingsError(f"there is no backend {alias!r}.{hint} Known: {', '.join(sorted(BACKENDS))}")
    target, extra = BACKENDS[alias]
    module_name, _, class_name = target.partition(":")
    try:
        if alias in _ON_TORCH:
            teams.bind(host.places)
        backend: type[Backend] = getattr(import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        if not extra:
            raise
        raise MissingExtra(extra, f"backend {alias!r}") from error
    if unknown := set(options) - set(backend.OPTIONS):
        known = ", ".join(backend.OPTIONS) or "none"
        raise SettingsError(f"backend {alias!r} has no option {', '.join(sorted(unknown))}; known: {known}")
    return backend.load(model, entry, host, options)
