"""The benchmark of the host side, from end to end, with its own Redis and workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.ours.host_side", "--quick", *map(str, arguments)]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=400)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_host_side_is_measured_in_turns_with_another_checkout(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    place = tmp_path / "place"
    done = _run("--modes", "cached", "--profile", "--other", _ROOT, "--place", place, "--output", report)
    assert done.returncode == 0, done.stderr
    written = report.read_text()
    assert done.stdout == f"{written}\n"
    assert "| this / other |" in written
    assert "| cached | 384 | 4 | 128 | " in written
    for side in ("this", "other"):
        assert f"## cached, 384 dimensions, 4 threads, chunks of 128: {side}" in written
    assert "| MainThread | " in written
    assert "StandInEngine.run" in written


@pytest.mark.slow
def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    done = _run("--other", tmp_path, "--place", tmp_path / "place")
    assert done.returncode
    assert f"{tmp_path} is no checkout of embedctl" in done.stderr
