"""Ways to turn tokens into vectors, by name; loaded when asked for."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING

from embedctl_config.errors import MissingExtra, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from embedctl_config.hardware import ModelEntry
    from embedctl_workers.backends.base import Backend
    from embedctl_workers.machine.host import Host

#: Alias → (module:class, the extra that brings what it needs).
BACKENDS = {
    "dummy": ("embedctl_workers.backends.dummy:DummyBackend", ""),
    "neuron": ("embedctl_workers.backends.neuron.backend:NeuronBackend", "neuron"),
    "onnx": ("embedctl_workers.backends.onnx.backend:OnnxBackend", "onnx"),
    "onnx-int8": ("embedctl_workers.backends.onnx.backend:OnnxInt8Backend", "onnx"),
    "tensorrt": ("embedctl_workers.backends.tensorrt.backend:TensorRTBackend", "tensorrt"),
    "torch": ("embedctl_workers.backends.torch.backend:TorchBackend", "torch"),
    "torch-gpu": ("embedctl_workers.backends.gpu.backend:TorchGpuBackend", "gpu"),
}


def load_backend(
    alias: str,
    model: str,
    *,
    entry: ModelEntry | None,
    host: Host,
    options: Mapping[str, str | int | float | bool],
) -> Backend:
    """Load a model into a backend.

    Args:
        alias: a key of :data:`BACKENDS`.
        model: the name under which jobs ask for it; `entry` says where it comes from.
        host: what it may use of this machine.
        options: the hardware class's settings for this backend.

    Raises:
        SettingsError: there is no such backend, or an option that it does not know.
        MissingExtra: what it needs is not installed.
        ModelError: the model can't be found or loaded.
    """
    if alias not in BACKENDS:
        close = difflib.get_close_matches(alias, BACKENDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SettingsError(f"there is no backend {alias!r}.{hint} Known: {', '.join(sorted(BACKENDS))}")
    target, extra = BACKENDS[alias]
    module_name, _, class_name = target.partition(":")
    try:
        backend: type[Backend] = getattr(import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        if not extra:
            raise
        raise MissingExtra(extra, f"backend {alias!r}") from error
    if unknown := set(options) - set(backend.OPTIONS):
        known = ", ".join(backend.OPTIONS) or "none"
        raise SettingsError(f"backend {alias!r} has no option {', '.join(sorted(unknown))}; known: {known}")
    return backend.load(model, entry, host, options)
