"""Builds of artefacts in this process, which has their packages, where a worker would start another one for each."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from embedctl_workers.models import build_process


def build_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(build_process, "run_build", _run)


def _run(module: str, request: dict[str, Any]) -> Any:
    return import_module(module).build(json.loads(json.dumps(request)), lambda line: None)
