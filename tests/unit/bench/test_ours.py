"""The project's own probes, as the pages name them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_probe_has_a_redis_of_its_own_and_takes_turns_with_another_checkout() -> None:
    command = [sys.executable, "-m", "benchmarks.ours.probes", "drain", "--rounds", "1", "--other", str(ROOT)]
    command += ["--set", "records=2000", "--set", "dim=8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    for figure in ("figure | this | other | this / other", "drainer: peak MiB", "parts"):
        assert f"| {figure} |" in done.stdout
