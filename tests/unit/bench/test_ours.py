"""Our own scripts: small real runs, and what decides their figures."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.ours.accuracy import graded_pairs, similarity
from benchmarks.ours.probes import main, table

from embedctl_workers.backends.gpu.transfer import Transfer
from tests.support.host_stand_in import StandInDevice

ROOT = Path(__file__).parents[3]
IDS = ["os#1", "os.walk#1", "os.walk#2", "os.path.join#1", "re.compile#1", "re.match#1", "re.match#2"]


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


def test_the_stand_in_for_a_gpu_takes_its_time_for_one_batch_after_the_other() -> None:
    device = StandInDevice(ns_per_token=4e6)
    transfer = Transfer(device)
    began = time.monotonic()
    outputs = []
    for tokens in (30, 20):
        with transfer.computing():
            device.compute(tokens)
        outputs.append(transfer.download(torch.zeros(1, 2)))
    for output, least in zip(outputs, (0.12, 0.2), strict=True):
        output.wait()
        assert time.monotonic() - began >= least


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["drains"], "invalid choice: 'drains'"),
        (["submit_rate", "--set", "rows=1"], "--set rows: submit_rate has records"),
        (["submit_rate", "--other", "/nowhere"], "/nowhere is no checkout of embedctl"),
    ],
)
def test_what_is_not_there_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["probes", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert said in capsys.readouterr().err + str(ended.value.code)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("probe", "options", "figures"),
    [
        ("drain", ["records=2000", "dim=8"], ["drainer: peak MiB", "parts"]),
        (
            "service_scale",
            ["workers=5", "kept=20", "active=2", "seconds=1", "calls=1"],
            ["chunks/s", "share of a CPU", "status: p50 ms", "doctor: longest ms", "script complete: mean ms"],
        ),
    ],
)
def test_a_probe_has_a_redis_and_workers_of_its_own(probe: str, options: list[str], figures: list[str]) -> None:
    turns = ["--other", str(ROOT)] if probe == "drain" else []
    given = [word for each in options for word in ("--set", each)]
    command = [sys.executable, "-m", "benchmarks.ours.probes", probe, "--rounds", "1", *turns, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    assert ("| this / other |" in done.stdout) == bool(turns)
    for figure in figures:
        assert f"| {figure} | " in done.stdout
