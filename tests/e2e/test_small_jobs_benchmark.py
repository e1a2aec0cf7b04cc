"""The benchmark of small jobs runs; its figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_tells_rates_ratios_and_waits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/ours/small_jobs.py", "--rounds", "1", "--jobs", "8", "--singles", "3"],
        cwd=ROOT,
        env={**os.environ, "EMBEDCTL_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "this: one text: p50 " in done.stdout
    for load in ("64 callers, jobs of 4 texts", "100 callers, jobs of 1 to 8 texts"):
        assert f"this: {load}: " in done.stdout
        assert f"this: {load}: one job: CPU ms a text: callers " in done.stdout
