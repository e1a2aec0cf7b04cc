"""`embedctl bench study`: its rows in order, their multiples of the first, and what is said where they are less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embedctl_bench.measuring.cells import Bench, Case, Found
from embedctl_bench.measuring.sampled import Samples
from embedctl_bench.peers.registry import FLOOR, System, backend_of
from embedctl_bench.report.report import Report
from embedctl_bench.study import command as study
from embedctl_bench.study.command import FULL, QUICK, measure, requests_of, setups_for
from embedctl_bench.study.report import report
from embedctl_bench.study.results import INT8, ONNX, SETUPS, TORCH, Setup, StudyResult
from embedctl_config.errors import ModelError
from embedctl_workers.models.files import ModelFiles
from tests.support.bench import asked, steady

CPU = backend_of("cpu")
MODEL = ModelFiles("mini", Path(), "f" * 64)
MEMORY = {"peak": 500e6, "weights": 90e6, "engine": "made up"}
ACCURACY = {"max_abs_error": 0.01, "min_cosine": 0.98, "mean_cosine": 0.993}


def found(rate: float, batch: int) -> Found:
    return Found(Samples(rate, [batch / rate] * 200), steady(rate), batch)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    wanted = asked(tmp_path, classes=("cpu", "cpu-int8"), price=1.0)
    processes = type("None", (), {"keep": lambda self, seats, model: None})()
    return Bench(wanted, wanted.session("study", 10), processes, 3)


def result_of(rates: dict[Setup, float]) -> StudyResult:
    result = StudyResult(MODEL, "shown")
    for setup in rates:
        result.memory[setup] = {**MEMORY, "weights": 23e6} if setup.system == INT8 else MEMORY
    result.sustained = {setup.label: found(rate, setup.batch) for setup, rate in rates.items()}
    result.latency = dict(result.sustained)
    result.accuracy = {setup.label: ACCURACY for setup in rates}
    return result


def made(bench: Bench, result: StudyResult) -> Report:
    with bench.session:
        return report([result], setups_for(("cpu", "cpu-int8")), bench, FULL)


def test_the_rows_are_the_studys_then_the_other_classes() -> None:
    assert [setup.label for setup in setups_for(("cpu", "cpu-int8", "onnx"))] == [
        "torch, single",
        "torch, batch 32",
        "ONNX, single",
        "ONNX int8, single",
        "ONNX int8, batched",
        "class cpu, single",
        "class cpu, batch 32",
    ]
    assert [setup.published for setup in SETUPS] == [68, 195, 151, 234, 602]


def test_requests_are_of_one_size() -> None:
    texts = [str(at) for at in range(7)]
    assert requests_of(texts, 3) == [["0", "1", "2"], ["3", "4", "5"]]


def test_a_row_that_is_less_than_published_is_bold_and_said_to_be(bench: Bench) -> None:
    # 2 × for batches, where 2.87 were published; 9 × in the end, where 8.85 were.
    whole = made(bench, result_of(dict(zip(SETUPS, (100, 200, 300, 400, 900), strict=True))))
    rows = {row["setup"]: row for row in whole.tables[0].rows}
    assert rows["torch, batch 32"]["_bold"]
    assert rows["torch, batch 32"]["times"] == 2.0
    assert rows["torch, batch 32, as published"]["times"] == pytest.approx(2.87, abs=0.005)
    assert rows["torch, batch 32, as published"]["_published"]
    assert not rows["ONNX int8, batched"]["_bold"]
    assert "**mini: torch, batch 32 is 2.00 × the first row, less than the 2.87 × published.**" in whole.notes
    claims = {claim.what: claim for claim in whole.claims}
    assert claims["mini: int8 batched, times torch with one text at a time"].met
    assert claims["mini: weights"].met
    assert claims["mini: mean cosine of int8"].met


def test_a_claim_that_is_not_met_says_where_the_rest_is(bench: Bench) -> None:
    whole = made(bench, result_of(dict(zip(SETUPS, (100, 290, 300, 400, 500), strict=True))))
    claim = whole.claims[0]
    assert (claim.published, claim.ours, claim.met) == ("8.85", "5.00", False)
    assert "ONNX int8, batched 5.00 × here and 8.85 × there" in claim.why


def test_torch_ahead_of_a_class_of_ours_is_said_in_bold(bench: Bench) -> None:
    cpu = Setup("class cpu, single", CPU, 1)
    whole = made(bench, result_of({SETUPS[0]: 100.0, cpu: 90.0}))
    assert "**mini: torch is ahead of class cpu, single, which has 0.90 × its rate.**" in whole.notes


def test_units_of_a_row(bench: Bench) -> None:
    row = made(bench, result_of({SETUPS[0]: 100.0, SETUPS[4]: 1000.0})).tables[0].rows[8]
    assert (row["setup"], row["weights_mb"], row["peak_mb"]) == ("ONNX int8, batched", 23, 500)
    assert row["p50_ms"] == pytest.approx(32), "a latency is of a whole request"
    assert row["cost_per_million"] == pytest.approx(1e6 / 1000 / 3600), "1,000 texts/s at 1 an hour"
    assert row["max_abs_error"] == "1.0e-02"


def test_the_sweep_is_beside_the_floor(bench: Bench) -> None:
    result = result_of({SETUPS[0]: 100.0})
    result.sweep = {(TORCH, 8): found(120, 8), (FLOOR, 8): found(480, 8), (TORCH, 1): found(100, 1)}
    result.padding = {(TORCH, 8): 0.5}
    whole = made(bench, result)
    rows = {(row["system"], row["batch"]): row for row in whole.tables[1].rows}
    assert rows["sentence-transformers", 8]["share_of_floor"] == 0.25
    assert rows["sentence-transformers", 8]["padding_percent"] == 50
    assert rows["sentence-transformers", 1]["share_of_floor"] is None
    assert [plot.name for plot in whole.plots] == [
        "mini-rows",
        "mini-throughput",
        "mini-latency",
        "mini-floor",
        "mini-padding",
        "mini-cost",
    ]


def test_each_part_is_measured_and_a_setup_that_fails_is_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, list[str]] = {}

    class Process:
        def __init__(self, system: System, *arguments: Any) -> None:
            if system == ONNX:
                raise ModelError("no onnxruntime")
            self.facts = type("Facts", (), {"model_bytes": 90, "engine": "made up"})
            self.sample = self.close = lambda *arguments: None
            self.peak_bytes = lambda: 500

        def count(self, batches: list[list[str]]) -> tuple[int, int]:
            return 100, 150

    def cells(self: Bench, key: str, model: ModelFiles, cases: dict[str, Case]) -> dict[str, Found]:
        keys[key] = list(cases)
        return {name: found(100.0, len(case.requests[0])) for name, case in cases.items()}

    monkeypatch.setattr(study, "SampledProcess", Process)
    monkeypatch.setattr(Bench, "measure", cells)
    monkeypatch.setattr(Bench, "alone", lambda self, system, model: Process(system))
    monkeypatch.setattr(Bench, "accuracy", lambda self, requests, *arguments: dict.fromkeys(requests, ACCURACY))
    result = StudyResult(MODEL, "shown")
    with bench.session:
        measure(bench, result, setups_for(("cpu",)), QUICK)
    left = ["torch, single", "torch, batch 32", "ONNX int8, single", "ONNX int8, batched"]
    left += ["class cpu, single", "class cpu, batch 32"]
    assert keys["latency"] == keys["sustained"] == left
    systems = [TORCH.name, INT8.name, CPU.name, FLOOR.name]
    assert {key: names for key, names in keys.items() if "sweep" in key} == {
        f"sweep, batch {batch}": systems for batch in (1, 8, 32)
    }
    assert result.memory[SETUPS[0]] == {"peak": 500, "weights": 90, "engine": "made up"}
    assert set(result.padding.values()) == {0.5}
    assert any("ONNX, single" in note and "no onnxruntime" in note for note in bench.session.notes)
