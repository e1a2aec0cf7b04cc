"""Our own scripts: one small real run of each family, and what decides their figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.ours.accuracy import graded_pairs, similarity
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
        assert similarity(vectors, pairs, np.array(nearness)) == pytest.approx(score)


def test_a_probes_ratio_is_of_the_same_round() -> None:
    found = {"other": [{"s": 2.0}, {"s": 8.0}, {"s": 3.0}], "this": [{"s": 1.0}, {"s": 2.0}, {"s": 1.0}]}
    assert "| figure | this | other | this / other |" in table(found)
    assert "| s | 1 (1–2) | 3 (2–8) | 0.333333 (0.25–0.5) |" in table(found)


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
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("probe", "options", "figures"),
    [
        ("drain", ["records=2000", "dim=8"], ["drainer: peak MiB", "parts"]),
        ("host_side", ["texts=1024", "chunk=128", "seconds=0.1", "cached=1"], ["texts/s", "CPU µs a text, Redis"]),
        ("shares", ["seconds=3", "only=1 and 3"], ["50 jobs and 1 job, weights 1 and 3: share of one"]),
        (
            "service_scale",
            ["workers=20", "kept=200", "active=5", "seconds=2", "calls=2"],
            ["chunks/s", "share of a CPU", "status: p50 ms", "doctor: longest ms", "script complete: mean ms"],
        ),
    ],
)
def test_a_probe_has_a_redis_and_workers_of_its_own(
    probe: str, options: list[str], figures: list[str], tmp_path: Path
) -> None:
    options = [*options, f"place={tmp_path}"] if probe == "host_side" else options
    done = run("probes", probe, "--rounds", "1", *(word for each in options for word in ("--set", each)))
    assert done.returncode == 0, done.stderr
    for figure in figures:
        assert f"| {figure} | " in done.stdout
