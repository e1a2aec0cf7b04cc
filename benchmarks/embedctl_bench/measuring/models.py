"""The models that are measured, and the folder of the peers' environments and models."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from embedctl_bench.measuring.shapes import source_of
from embedctl_config.hardware import ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.files import ModelFiles, resolve_model


def model_files(name: str, settings: Settings) -> ModelFiles:
    """A model as it is configured, or a shape's.

    Raises:
        ModelNotFound, ModelError: as :func:`~embedctl_workers.models.files.resolve_model`.
    """
    entry = settings.models.get(name, ModelEntry())
    source = entry.source or source_of(name, settings)
    return resolve_model(name, replace(entry, source=source))


def peers_folder(settings: Settings) -> Path:
    """The folder of the peers' environments and of their forms of models."""
    return cache_folder(settings) / "peers"


def copy_name(model: ModelFiles) -> str:
    """The name of a model's copies and conversions; another one for other weights."""
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', model.name).strip('-')}-{model.fingerprint[:8]}"


def slug(name: str) -> str:
    """A name as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-")
