"""Systems choose their settings and take turns, and what they measured outlives the command."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click import Command
from click.testing import CliRunner

from embedctl_bench import engines, grid
from embedctl_bench.engines import gpu_idle, peers_for, run_on, systems_for
from embedctl_bench.measuring import contenders
from embedctl_bench.measuring.comparison import Load, Scene
from embedctl_bench.measuring.contenders import Contender, Ground, compete
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import BASELINE, FLOOR, PEERS, SENTENCE_TRANSFORMERS, System
from embedctl_bench.peers.tuned import Run, Task, Workload
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from tests.support.bench import Process, asked
from tests.support.waiting import eventually

SMALL = Model("m", Path(), 2 * 6 * 12 * 384.0**2)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "TunedSystem", Process)
    Process.events, Process.offered = [], []


def ground(folder: Path, session: Any, *, quick: bool = False) -> Ground:
    workload = Workload("W1", ["a", "b"], (10,) * 2, chunk=512)
    return Ground("m", Task(SMALL, workload, [0], folder), np.ones((2, 3), np.float32), session, quick)


def go(folder: Path, *systems: System, run: Any = None) -> Scene:
    """What systems measured in two rounds."""
    Process.events = []
    scene = Scene("m", SMALL, "a model", [Load("W1", 2, 2)])
    with asked(folder, fresh=False).session("engines", 12) as session:
        compete(scene, systems, ground(folder, session), run or run_on(asked(folder), 0.0))
    return scene


def test_a_class_is_measured_by_its_engine_and_by_the_product_beside_a_baseline(tmp_path: Path) -> None:
    wanted = asked(tmp_path, classes=("cpu", "cpu-int8"), cpus=frozenset(range(4)))
    ours = ["embedctl-engine-cpu", "embedctl-engine-cpu-int8", "embedctl-cpu", "embedctl-cpu-int8"]
    floors = ["floor", "floor-attention", "floor-int8"]
    assert [system.name for system in systems_for(wanted, [])] == [*floors, SENTENCE_TRANSFORMERS.name, *ours]
    peers = [PEERS["fastembed"], PEERS[BASELINE]]
    assert [system.name for system in systems_for(wanted, peers)] == [*floors, "fastembed", BASELINE, *ours]
    found = {system.name: system for system in systems_for(wanted, [])}
    assert found["embedctl-engine-cpu-int8"].precision == found["embedctl-cpu-int8"].precision == "int8"
    assert [each.load for each in found["embedctl-cpu"].settings] == [{"workers": 1}, {"workers": 2}]
    assert [each.processes for each in found["embedctl-engine-cpu"].settings] == [1, 2]

    classes = {**Settings().classes, "cpu-bf16": HardwareClass(precision="fp16")}
    systems = systems_for(asked(tmp_path, classes=("cpu-bf16",), settings=Settings(classes=classes)), [])
    names = ["floor", "floor-attention", "floor-bf16", "sentence-transformers", "sentence-transformers-bf16"]
    assert [system.name for system in systems][:5] == names, "beside a class of 16 bits"


def test_on_a_gpu_sentence_transformers_runs_there_too_and_peers_are_refused(tmp_path: Path) -> None:
    wanted = asked(tmp_path, classes=("gpu",), device="gpu")
    floor, plain, bf16, engine, product = systems_for(wanted, [])
    assert floor.name == "floor-gpu"
    assert {setting.load["device"] for system in (plain, bf16) for setting in system.settings} == {"cuda"}
    assert max(setting.encode["batch"] for setting in bf16.settings) == 1024
    assert (len(engine.settings), len(product.settings)) == (1, 1)
    assert peers_for(wanted) == ([], [])
    with pytest.raises(SettingsError, match="they run on CPUs, and gpu does not"):
        peers_for(replace(wanted, peers=("fastembed",)))


def test_systems_take_turns_after_a_run_to_warm_up_and_a_second_command_runs_nothing(tmp_path: Path) -> None:
    systems = [FLOOR, SENTENCE_TRANSFORMERS, PEERS["fastembed"], PEERS["infinity"]]
    scene = go(tmp_path, *systems)
    names = ["floor", "sentence-transformers", "infinity"]
    assert Process.events[:6] == [event for name in names for event in (f"{name} loaded", name)], "to warm up"
    assert Process.events[6:13] == [*names, "infinity", "sentence-transformers", "floor", "infinity closed"]
    assert sorted(Process.events[13:]) == ["floor closed", "sentence-transformers closed"]
    _, torch, fastembed, infinity = scene.runs
    assert [len(each.loads.get("W1", {})) for each in scene.runs] == [2, 2, 0, 1]
    assert (fastembed.unavailable, infinity.unavailable) == ("no wheels", "out of memory")
    assert (torch.setting, torch.versions) == ("1×1, batch 8", {"torch": "2"})
    assert torch.accuracy == pytest.approx({"max_abs_error": 0.0, "min_cosine": 1.0, "mean_cosine": 1.0})
    (comparison,) = scene.measured()
    assert comparison.systems[1].ratios(comparison.systems[0]) == [1.0]
    assert [run.seconds for run in comparison.floors[0].rounds.values()] == [2.0, 2.0]

    again = go(tmp_path, *systems[:2])
    assert Process.events == []
    assert [run.seconds for run in again.runs[1].loads["W1"].values()] == [2.0, 2.0]


def figures_of(command: Command, folder: Path, patch: pytest.MonkeyPatch, *options: str) -> list[dict[str, Any]]:
    """The rows of a command's figures, with class `cpu` on a small model."""
    patch.setenv("EMBEDCTL_CACHE_DIR", str(folder / "cache"))
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    for module in (engines, grid):
        patch.setattr(module, "measured_model", lambda *_: replace(SMALL, folder=folder))
        patch.setattr(module, "make_workload", lambda *_: ground(folder, None).task.workload)
    patch.setattr(grid, "exact_requests", lambda model, length, batch, count: [["a text"] * batch] * count)
    patch.setattr("embedctl_bench.asking.reference_of", lambda *_: np.ones((2, 3), np.float32))
    options = (*options, "--quick", "--class", "cpu", "--peers", "none", "-o", str(folder / "report"))
    done = CliRunner().invoke(command, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    tables = json.loads((folder / "report" / f"{command.name}.json").read_text())["tables"]
    (rows,) = (table["rows"] for table in tables if table["name"].endswith("figures"))
    found: list[dict[str, Any]] = rows
    return found


def test_the_command_ranks_engines_beside_the_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = figures_of(engines.command, tmp_path, monkeypatch, "--workload", "W1")
    assert [(row["system"], row["rank"]) for row in rows] == [
        ("sentence-transformers, torch", 1),
        ("embedctl's engine, class cpu", 2),
        ("embedctl, class cpu", 3),
        ("floor", None),
        ("floor with attention", None),
    ]


def test_a_grid_of_one_cell_is_beside_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = figures_of(grid.command, tmp_path, monkeypatch, "--cores", "1", "--length", "8", "--batch", "2")
    by_system = {row["system"]: row for row in rows}
    assert set(by_system) == {"embedctl's engine, class cpu", "transformers", "floor"}
    assert {(row["length"], row["batch"], row["texts_per_s"] * row["seconds"]) for row in rows} == {(8, 2, 178)}
    assert (by_system["transformers"]["share_of_floor"], by_system["transformers"]["times"]) == (0.5, 1)


def test_a_half_round_is_measured_anew(tmp_path: Path) -> None:
    calls: list[str] = []

    def run(load: Load, contender: Contender) -> Run:
        calls.append(contender.runs.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return Run(1.0, 20)

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, FLOOR, SENTENCE_TRANSFORMERS, run=run)
    scene = go(tmp_path, FLOOR, SENTENCE_TRANSFORMERS, run=run)
    first, second = "floor", "sentence-transformers"
    assert calls == [first, second, second, first, second, first]
    assert [len(each.loads["W1"]) for each in scene.runs] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--class", "cpu", "--class", "gpu"], "--class: measure classes of cpu and gpu apart"),
        (["--peers", "fastembd", "--class", "cpu"], "--peers: there is no fastembd. Known: st-torch,"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(tmp_path / "cache"))
    done = CliRunner().invoke(engines.command, [*arguments, "-o", str(tmp_path / "report")])
    assert done.exit_code
    assert said in done.output + str(done.exception)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(("says", "idle"), [(("50", "70", "7"), 0.4), (("[N/A]",), float("nan"))])
def test_a_gpu_is_idle_as_its_driver_says_if_it_does(
    says: tuple[str, ...], idle: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f"2026/11/26 10:00:0{at}.500, {each}\\n" for at, each in enumerate(says))
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\ntouch {tmp_path / 'said'}\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with gpu_idle() as between:
        eventually((tmp_path / "said").exists)
    began = datetime(2026, 11, 26, 10).timestamp()
    assert between(began, began + 2) == pytest.approx(idle, nan_ok=True)
