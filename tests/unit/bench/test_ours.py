"""Our own scripts: one small real run of each family, and what decides their figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.ours.accuracy import Truth, graded_pairs
from benchmarks.ours.probes import table

ROOT = Path(__file__).parents[3]
IDS = ["os#1", "os.walk#1", "os.walk#2", "os.path.join#1", "re.compile#1", "re.match#1", "re.match#2"]


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.ours.{script}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)


def test_pairs_are_graded_by_where_their_passages_stand() -> None:
    pairs, nearness = graded_pairs(IDS)
    assert set(nearness.tolist()) == {0, 1, 2}
    for (one, other), grade in zip(pairs.tolist(), nearness.tolist(), strict=True):
        assert one != other
        docstrings, packages = ({re.split(ends, IDS[row])[0] for row in (one, other)} for ends in ("#", "[.#]"))
        assert grade == (2 if len(docstrings) == 1 else 1 if len(packages) == 1 else 0)


def test_the_score_is_a_correlation_of_ranks() -> None:
    vectors = np.eye(3, dtype=np.float32)[[0, 0, 1]]
    pairs = np.array([[0, 1], [0, 2], [1, 2]])
    for nearness, score in (([2, 0, 0], 1.0), ([0, 2, 2], -1.0)):
        assert Truth([], vectors, pairs, np.array(nearness)).similarity(vectors) == pytest.approx(score)


def test_a_probes_ratio_is_of_the_same_round() -> None:
    found = {"other": [{"s": 2.0}, {"s": 8.0}, {"s": 3.0}], "this": [{"s": 1.0}, {"s": 2.0}, {"s": 1.0}]}
    assert "| figure | this | other | this / other |" in table(found)
    assert "| s | 1 (1–2) | 3 (2–8) | 0.3333 (0.25–0.5) |" in table(found)


def test_a_probe_or_an_option_that_is_not_there_is_refused() -> None:
    assert "invalid choice: 'drains'" in run("probes", "drains").stderr
    assert "--set rows: submit_rate has records" in run("probes", "submit_rate", "--set", "rows=1").stderr


@pytest.mark.slow
def test_probes_take_turns_with_another_checkout(tmp_path: Path) -> None:
    done = run("probes", "submit_rate", "--set", "records=200", "--rounds", "1", "--other", ROOT)
    assert done.returncode == 0, done.stderr
    assert "| records/s | " in done.stdout
    assert "| this / other |" in done.stdout
    done = run("probes", "submit_rate", "--other", tmp_path)
    assert f"{tmp_path} is no checkout of embedctl" in done.stderr


@pytest.mark.slow
def test_a_probe_of_a_job_has_its_own_redis_and_worker() -> None:
    done = run("probes", "drain", "--set", "records=2000", "--set", "dim=8", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "| drainer: peak MiB | " in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_host_side_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = run("host_side", "--quick", "--modes", "cached", "--place", tmp_path / "place", "--output", report)
    assert done.returncode == 0, done.stderr
    assert "| cached | 384 | 4 | 128 | " in report.read_text()
    assert done.stdout == f"{report.read_text()}\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_large_service_yields_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    small = ["--workers", "20", "--kept", "200", "--active", "5", "--seconds", "2", "--calls", "2"]
    done = run("service_scale", *small, "--json", figures)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["workers"] == 20
    assert found["jobs"] >= 205
    assert {"cpu_share", "commands_per_s", "chunks_per_s", "used_memory", "slowest"} <= found.keys()
    assert {"a round of the reaper", "status", "list", "doctor"} <= found["calls"].keys()
    assert all(each["p50_ms"] <= each["p99_ms"] <= each["max_ms"] for each in found["calls"].values())
    assert {"script claim", "script complete"} <= found["per_command"].keys()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shares_yield_their_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("shares", "--seconds", "3", "--only", "1 and 3", "--json", figures)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(figures.read_text()).values()
    assert 0.5 < found["share of one"] < 1  # its weight is 3, and the other tenant's 1
    assert found["records/s"] > 0
