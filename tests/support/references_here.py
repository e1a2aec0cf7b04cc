"""Computes references in this process, which has torch, instead of in a separate one."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.machine.host import Host
from embedctl_workers.models import references
from embedctl_workers.models.files import ModelFiles


@functools.cache
def sentence_transformer(folder: Path) -> Any:
    """The model of a folder. sentence-transformers loads it once per process."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def compute_here(files: ModelFiles, host: Host, path: Path) -> dict[str, Vectors] | None:
    """Stands in for `embedctl_workers.models.references._compute`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["references", str(files.folder), str(path)])
        references.main()
    return references._load(path)
