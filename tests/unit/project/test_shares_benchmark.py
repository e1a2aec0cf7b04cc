"""The benchmark of shares runs, and yields its figures as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/ours/shares.py"


@pytest.mark.slow
def test_the_benchmark_of_shares_yields_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seconds", "3", "--only", "1 and 3", "--json", str(figures)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(figures.read_text()).values()
    assert 0.5 < found["share of one"] < 1  # its weight is 3, and the other tenant's 1
    assert found["records/s"] > 0
