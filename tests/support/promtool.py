"""Prometheus' own tool, where there is one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def need_promtool() -> str:
    """The path of promtool. If there is none, the test is skipped; in CI it fails."""
    unpacked = ROOT / "build" / "promtool" / "promtool"
    found = str(unpacked) if unpacked.is_file() else shutil.which("promtool")
    if found is None:
        reason = "there is no promtool: `tests/support/get-promtool.sh` unpacks Debian's, as root"
        return (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return found
