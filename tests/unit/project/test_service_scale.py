"""The benchmark of a large service runs, and yields its figures as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/ours/service_scale.py"


@pytest.mark.slow
def test_the_benchmark_of_a_large_service_yields_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    small = ["--workers", "20", "--kept", "200", "--active", "5", "--seconds", "2", "--calls", "2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *small, "--json", str(figures)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["workers"] == 20
    assert found["jobs"] >= 205
    assert {"cpu_share", "commands_per_s", "chunks_per_s", "used_memory", "slowest"} <= found.keys()
    assert {"a round of the reaper", "status", "list", "doctor"} <= found["calls"].keys()
    assert all(each["p50_ms"] <= each["p99_ms"] <= each["max_ms"] for each in found["calls"].values())
    assert {"script claim", "script complete"} <= found["per_command"].keys()
