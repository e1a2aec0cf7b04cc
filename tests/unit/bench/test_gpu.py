"""The benchmark on a GPU: what its systems choose their settings on, and how it watches the device."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ours import gpu, utilisation
from benchmarks.ours.gpu_report import BF16, FP32, OURS, GpuComparison

from embedctl_bench.measuring.shapes import SHAPES
from embedctl_bench.peers.child import ChildProcess, Unavailable
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.workload import Workload
from tests.support.waiting import eventually


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How systems are told to load; none is started."""
    requests: list[dict[str, Any]] = []

    def call(_: ChildProcess, **request: Any) -> dict[str, Any]:
        requests.append(request)
        raise Unavailable("it is not started")

    monkeypatch.setattr(ChildProcess, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(ChildProcess, "call", call)
    monkeypatch.setattr(ChildProcess, "close", lambda _: None)
    return requests


@pytest.mark.parametrize("shape", ["bge-base-shape", "bge-large-shape"])
@pytest.mark.parametrize(("name", "length"), [("W1", 37), ("W2", 450)])
def test_every_batch_size_of_a_gpu_is_tried_on_a_batch_of_its_own_size(
    shape: str, name: str, length: int, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    device = object.__new__(gpu.MeasuredDevice)
    device.kind, device.cpus = "gpu", [0]
    sizes = SHAPES[shape]
    model = Model("m", Path("m"), layers=sizes.layers, hidden=sizes.hidden, inner=4 * sizes.hidden)
    (tmp_path / "texts.json").write_text("[]")
    workload = Workload(name, tmp_path / "texts.json", (length,) * gpu.COUNTS[name][0], chunk=512)
    comparison = GpuComparison(model, workload)
    gpu._compare(comparison, device, rounds=0, seconds=1.0)
    samples = {result: request["sample"] for result, request in zip(comparison.results, asked, strict=True)}
    tried = {
        result: [each["encode"].get("batch", 1) for each in request["settings"]]
        for result, request in zip(comparison.results, asked, strict=True)
    }
    for system in (BF16, FP32):
        assert max(tried[system]) == 1024
        assert samples[system] == len(workload.lengths) >= max(tried[system])
    assert samples[OURS] == len(workload.lengths)


@pytest.mark.parametrize(
    ("says", "busy", "what"),
    [
        ("50\n70\n", 0.6, "the driver's utilisation"),
        ("[N/A]\n[N/A]\n", None, "the driver does not say how busy this GPU is: [N/A]"),
        ("[N/A]\n40\n", 0.4, "the driver"),
    ],
)
def test_a_driver_that_does_not_say_how_busy_a_gpu_is_is_quoted(
    says: str, busy: float | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{says}'\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    began = time.time()
    with utilisation.gpu_samples("GPU-1") as samples:
        eventually(lambda: len(samples.taken) == sum(line.isdigit() for line in says.split("\n")))
        eventually(lambda: "N/A" not in says or "not say" in samples.what)
    idle = samples.idle(began, time.time())
    assert math.isnan(idle) if busy is None else idle == pytest.approx(1 - busy)
    assert samples.what.startswith(what)
