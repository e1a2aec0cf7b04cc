"""Packages that only some tests need."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def need(name: str) -> Any:
    """A module; if it is not installed, the test is skipped, and fails in CI."""
    try:
        return importlib.import_module(name)
    except ImportError:
        reason = f"{name} is not installed"
        return (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
