"""References computed in this process, which has torch, and not in one of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.machine.host import Host
from embedctl_workers.models import references
from embedctl_workers.models.files import ModelFiles


def compute_here(files: ModelFiles, host: Host, path: Path) -> dict[str, Vectors] | None:
    """Stands in for `embedctl_workers.models.references._compute`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["references", str(files.folder), str(path)])
        references.main()
    return references._load(path)
