"""Loads a model as its hardware class says, ready to encode but not yet measured."""

from __future__ import annotations

from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from embedctl_workers.backends import load_backend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.prompts import prompts_of


def load_encoder(settings: Settings, hardware: HardwareClass, model: str, host: Host) -> ChunkEncoder:
    """Load and warm up a model; raises as :func:`~embedctl_workers.backends.load_backend`."""
    backend = load_backend(
        hardware.backend, model, entry=settings.models.get(model), host=host, options=hardware.options
    )
    backend.warm_up()
    prompts = prompts_of(backend.reference.files.folder) if backend.reference else {}
    return ChunkEncoder(backend, hardware.token_budget or backend.token_budget, model=model, prompts=prompts)
