"""The figures of accuracy in the docs: which passages, which pairs, and how a class's vectors become a row."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from benchmarks.ours.accuracy import Truth, graded_pairs

IDS = ["os#1", "os.walk#1", "os.walk#2", "os.path.join#1", "re.compile#1", "re.match#1", "re.match#2"]


def test_pairs_are_graded_by_where_their_passages_stand() -> None:
    pairs, nearness = graded_pairs(IDS)
    assert set(nearness.tolist()) == {0, 1, 2}
    for (one, other), grade in zip(pairs.tolist(), nearness.tolist(), strict=True):
        assert one != other
        docstrings, packages = ({re.split(ends, IDS[row])[0] for row in (one, other)} for ends in ("#", "[.#]"))
        assert grade == (2 if len(docstrings) == 1 else 1 if len(packages) == 1 else 0)
    assert np.array_equal(graded_pairs(IDS)[0], pairs)


def test_the_score_is_a_correlation_of_ranks() -> None:
    vectors = np.eye(3, dtype=np.float32)[[0, 0, 1]]
    pairs = np.array([[0, 1], [0, 2], [1, 2]])
    for nearness, score in (([2, 0, 0], 1.0), ([0, 2, 2], -1.0)):
        assert Truth([], vectors, pairs, np.array(nearness)).similarity(vectors) == pytest.approx(score)


@pytest.mark.slow
def test_a_class_has_a_row_for_passages_and_one_for_the_gates_texts() -> None:
    command = [sys.executable, "-m", "benchmarks.ours.accuracy", "--passages", "40", "--class", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("| cpu")]
    assert [row[3] for row in rows] == ["passages", "the gate's"]
    assert all(float(row[4]) < 1e-5 for row in rows)
