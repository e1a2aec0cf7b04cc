"""Systems choose their settings and take turns, and what they measured outlives the command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from embedctl_bench.engines import command as engines
from embedctl_bench.engines.command import COUNTS, count_of, floors_for, measure, peers_for, systems_for
from embedctl_bench.engines.idle import gpu_samples
from embedctl_bench.engines.report import EnginesResult
from embedctl_bench.grid import command as grid
from embedctl_bench.grid.report import GridPlace, GridResult, GridScope
from embedctl_bench.measuring import contenders
from embedctl_bench.measuring.comparison import Run
from embedctl_bench.measuring.contenders import Ground
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import BASELINE, FLOOR, PEERS, SENTENCE_TRANSFORMERS, TRANSFORMERS, System
from embedctl_bench.peers.tuned import Effort, sample_of
from embedctl_bench.peers.workload import Workload
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from tests.support.bench import Process, asked
from tests.support.waiting import eventually

SMALL = Model("m", Path(), layers=6, hidden=384, inner=1536)
BASE = Model("base", Path(), layers=12, hidden=768, inner=3072)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "TunedProcess", Process)
    Process.events, Process.offered = [], []


@pytest.fixture
def result(tmp_path: Path) -> EnginesResult:
    (tmp_path / "texts.json").write_text("[]")
    workload = Workload("W1", tmp_path / "texts.json", (10,) * 2, chunk=512)
    return EnginesResult("m", "a model", SMALL, workload, 2)


def ground(folder: Path, result: EnginesResult, session: Any, *, quick: bool = False) -> Ground:
    return Ground("m", result.model, result.workload, np.ones((2, 3), np.float32), [0], folder, session, quick)


def go(folder: Path, result: EnginesResult, systems: Sequence[System]) -> list[str]:
    """What happens to the stand-ins."""
    Process.events = []
    with asked(folder, fresh=False).session("engines", 12) as session:
        measure(ground(folder, result, session), systems, [FLOOR], result)
    return Process.events


def test_a_class_is_measured_by_its_engine_and_by_the_product_beside_a_baseline(tmp_path: Path) -> None:
    wanted = asked(tmp_path, classes=("cpu", "cpu-int8"), cpus=frozenset(range(4)))
    ours = ["embedctl-engine-cpu", "embedctl-engine-cpu-int8", "embedctl-cpu", "embedctl-cpu-int8"]
    assert [system.name for system in systems_for(wanted, [])] == [SENTENCE_TRANSFORMERS.name, *ours]
    peers = [PEERS["fastembed"], PEERS[BASELINE]]
    assert [system.name for system in systems_for(wanted, peers)] == ["fastembed", BASELINE, *ours]
    found = {system.name: system for system in systems_for(wanted, [])}
    assert found["embedctl-engine-cpu-int8"].precision == found["embedctl-cpu-int8"].precision == "int8"
    assert [each.load for each in found["embedctl-cpu"].settings] == [{"workers": 1}, {"workers": 2}]
    assert [each.processes for each in found["embedctl-engine-cpu"].settings] == [1, 2]


def test_beside_a_class_of_16_bits_stands_sentence_transformers_in_bf16(tmp_path: Path) -> None:
    classes = {**Settings().classes, "cpu-bf16": HardwareClass(precision="fp16")}
    wanted = asked(tmp_path, classes=("cpu-bf16",), settings=Settings(classes=classes))
    systems = systems_for(wanted, [])
    assert [system.name for system in systems][:2] == ["sentence-transformers", "sentence-transformers-bf16"]
    assert [floor.name for floor in floors_for(systems, wanted)] == ["floor", "floor-bf16"]


def test_on_a_gpu_sentence_transformers_runs_there_too_and_peers_are_refused(tmp_path: Path) -> None:
    wanted = asked(tmp_path, classes=("gpu",), device="gpu")
    plain, bf16, engine, product = systems_for(wanted, [])
    assert {setting.load["device"] for system in (plain, bf16) for setting in system.settings} == {"cuda"}
    assert max(setting.encode["batch"] for setting in bf16.settings) == 1024
    assert (len(engine.settings), len(product.settings)) == (1, 1)
    assert [floor.name for floor in floors_for([product], wanted)] == ["floor-gpu"]
    assert peers_for(wanted, tmp_path) == ([], [])
    with pytest.raises(SettingsError, match="they run on CPUs, and gpu does not"):
        peers_for(replace(wanted, peers=("fastembed",)), tmp_path)


def test_a_larger_model_gets_fewer_texts_and_a_smaller_one_no_more() -> None:
    assert count_of("W1", SMALL) == COUNTS["W1"][0] == 2048
    assert count_of("W2", SMALL, quick=True) == COUNTS["W2"][1] == 24
    assert (count_of("W1", BASE), count_of("W2", BASE)) == (256, 24)
    assert count_of("W1", Model("tiny", Path(), layers=1, hidden=8, inner=8)) == 2048
    assert count_of("W1", BASE, device="gpu") == 8192


def test_systems_take_turns_after_a_run_to_warm_up_and_a_second_command_runs_nothing(
    result: EnginesResult, tmp_path: Path
) -> None:
    systems = [SENTENCE_TRANSFORMERS, PEERS["fastembed"], PEERS["infinity"]]
    events = go(tmp_path, result, systems)
    names = ["floor", "sentence-transformers", "infinity"]
    assert events[:6] == [event for name in names for event in (f"{name} loaded", name)], "to warm up"
    assert events[6:13] == [*names, "infinity", "infinity closed", "sentence-transformers", "floor"]
    assert sorted(events[13:]) == ["floor closed", "sentence-transformers closed"]
    comparison = result.comparison
    torch, fastembed, infinity = comparison.systems
    assert [len(each.runs) for each in comparison.systems] == [2, 0, 1]
    assert fastembed.unavailable == "no wheels"
    assert (torch.setting, torch.versions) == ("1×1, batch 8", {"torch": "2"})
    assert replace(torch.runs[0], min_cosine=1.0, mean_cosine=1.0, fetched=0.0) == Run(2.0, 20, 0.0, 1.0, 1.0, 0.0)
    assert infinity.ratios(torch) == [1.0]
    assert [run.seconds for floor in comparison.floors for run in floor.runs] == [2.0, 2.0]

    again = replace(result, runs=[])
    assert go(tmp_path, again, systems[:1]) == []
    assert [run.seconds for run in again.comparison.systems[0].runs] == [2.0, 2.0]


def test_the_first_setting_is_taken_by_a_quick_run(result: EnginesResult, tmp_path: Path) -> None:
    for quick in (True, False):
        with asked(tmp_path, quick=quick).session("engines", 2) as session:
            there = ground(tmp_path, result, session, quick=quick)
            contenders.Contender(SENTENCE_TRANSFORMERS, there, lambda process: None).choose()
    assert Process.offered == [1, len(SENTENCE_TRANSFORMERS.settings)]


def test_each_cell_of_the_grid_is_measured_and_what_cannot_be_is_noted(
    result: EnginesResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exact:
        def __init__(self, model: Model) -> None:
            pass

        def requests(self, tokens: int, batch: int, count: int) -> list[list[str]]:
            return [[f"{tokens} tokens"] * batch]

    monkeypatch.setattr(grid, "ExactTexts", Exact)
    monkeypatch.setattr(grid, "cores_of", lambda cpus: [frozenset({0}), frozenset({1})])
    monkeypatch.setattr(Model, "max_tokens", 256)
    scope = GridScope((1, 2, 4), (1, 2), (8, 512), (1, 4), Effort(10, 5, 200), Effort(1, 3, 200), 2)
    found = GridResult("m", "a model", scope)
    wanted = asked(tmp_path, cpus=frozenset({0, 1}))
    with wanted.session("grid", 10) as session:
        grid.measure(ground(tmp_path, result, session), [TRANSFORMERS, PEERS["fastembed"]], found, wanted)
    assert sorted(found.runs) == [(1, 1), (2, 1), (2, 2)]
    cell = found.on(GridPlace(2, 2, 8, 4))
    assert [(each.name, each.seconds) for each in cell.measured] == [("transformers", 0.4)]
    assert cell.row(cell.measured[0])["texts_per_s"] == pytest.approx(10.0)
    assert cell.measured[0].runs[0].tokens == 32
    assert cell.measured[0].runs[0].max_abs_error == 0.0
    why = {what: (why, cells) for what, why, cells in found.skipped}
    assert why["4 cores, 1 copies"] == ("--cpus 0-1 has 2", 4)
    assert why["1 cores, 2 copies"][0].startswith("each copy needs a core")
    assert why["512 tokens"] == ("the model takes 256", 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--class", "cpu", "--class", "gpu"], "--class: measure classes of cpu and gpu apart"),
        (["--peers", "fastembd", "--class", "cpu"], "--peers: there is no fastembd. Known: st-torch,"),
        (["--workload", "W3"], "Invalid value for '--workload'"),
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


@pytest.mark.parametrize(
    ("layers", "cpus", "expected"),
    [
        (6, 2, (50, 2)),
        (12, 2, (50, 2)),  # half as many would, and both processes are to have one
        (1, 2, (250, 10)),  # of a small model, all of them
        (12, 8, (200, 8)),
    ],
)
def test_settings_are_tried_with_requests_as_large_as_those_that_count(
    layers: int, cpus: int, expected: tuple[int, int]
) -> None:
    workload = Workload("w", Path("w"), (450,) * 255, chunk=255)
    assert sample_of(replace(SMALL, layers=layers), workload, request=25, cpus=cpus, chunked=True) == expected


def test_settings_for_one_call_are_tried_with_whole_chunks_for_two_processes() -> None:
    workload = Workload("w", Path("w"), (40,) * 2048, chunk=48)
    assert sample_of(SMALL, workload, request=0, cpus=2, chunked=False) == (589, 0)
    assert sample_of(SMALL, workload, request=0, cpus=2, chunked=True) == (672, 0)


@pytest.mark.parametrize(
    ("says", "busy", "what"),
    [("50\n70\n", 0.6, "the driver's utilisation"), ("[N/A]\n", None, "the driver does not say how busy this GPU is")],
)
def test_a_driver_that_does_not_say_how_busy_a_gpu_is_is_quoted(
    says: str, busy: float | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{says}'\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with gpu_samples() as samples:
        eventually(lambda: len(samples.taken) == says.count("0\n"))
        eventually(lambda: samples.what.startswith(what))
    idle = samples.idle(0.0, float("inf"))
    assert idle == (None if busy is None else pytest.approx(1 - busy))
