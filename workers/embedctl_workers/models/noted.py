"""Findings about a model on this machine: JSON in the cache folder, by the facts that they hold for."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import embedctl_workers
from embedctl_config.cpu import cpu_identity
from embedctl_config.errors import ModelError
from embedctl_workers.models.cache import keep, kept

log = logging.getLogger(__name__)

#: The libraries that make vectors of texts on a CPU.
_LIBRARIES = ("torch", "numpy", "onnxruntime", "tokenizers", "safetensors", "transformers", "sentence-transformers")
#: How the variables begin that tell them how to compute.
_VARIABLES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_")
_PACKAGE = Path(embedctl_workers.__file__).parent


def noted(cache: Path, kind: str, facts: object) -> Any:
    """What was noted under these facts; None if nothing was, or it can't be read or trusted, which is logged."""
    path = path_of(cache, kind, facts)
    data = kept(path)
    try:
        return None if data is None else json.loads(data)
    except ValueError as error:
        log.warning("%s is damaged and is made again: %s", path, error)
        return None


def note(cache: Path, kind: str, facts: object, finding: object) -> None:
    """Note a finding for :func:`noted`. Where the cache can't be written to, it is found again each time."""
    try:
        keep(path_of(cache, kind, facts), json.dumps(finding).encode())
    except (OSError, ModelError) as error:
        log.debug("what was found is not noted: %s", error)


def software() -> list[object]:
    """What computes on this CPU, beside the files of a model and what was compiled: some findings hold for this alone.

    Files of our package count by their size and time of change, libraries by their version.
    """
    ours = [Path(folder) for folder, _, _ in os.walk(_PACKAGE) if not folder.endswith("__pycache__")]
    return [
        cpu_identity(),
        [_version(name) for name in _LIBRARIES],
        sorted(each for each in os.environ.items() if each[0].startswith(_VARIABLES)),
        [files_in(folder) for folder in ours],
    ]


def files_in(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of change of the files of a folder; none if there is no such folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [(each.name, each.stat()) for each in entries if each.is_file()]
    return sorted((name, facts.st_size, facts.st_mtime_ns) for name, facts in found)


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def path_of(cache: Path, kind: str, facts: object) -> Path:
    """The file of a finding, which need not be there."""
    return cache / kind / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.json"
