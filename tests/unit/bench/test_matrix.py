"""`embedctl bench matrix`: its cells, what is left out of them, and the report beside the published figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedctl_bench.matrix import command as matrix
from embedctl_bench.matrix.command import FULL, measure
from embedctl_bench.matrix.report import report
from embedctl_bench.matrix.results import PRICE, PUBLISHED, MatrixCell, MatrixResult
from embedctl_bench.measuring.cells import Bench, Case, Found
from embedctl_bench.measuring.sampled import Facts, Samples
from embedctl_bench.measuring.sampling import cost_per_million
from embedctl_bench.peers.registry import backend_of
from embedctl_bench.report.report import Table
from embedctl_workers.models.files import ModelFiles
from tests.support.bench import Exact, asked, steady

CPU, INT8 = backend_of("cpu"), backend_of("cpu-int8")
MODEL = ModelFiles("all/Mini LM", Path(), "f" * 64)


def found(rate: float, batch: int) -> Found:
    return Found(Samples(rate, [batch / rate] * 120), steady(rate), batch)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    wanted = asked(tmp_path, classes=("cpu", "cpu-int8"), cpus=frozenset({0}), price=PRICE)
    return Bench(wanted, wanted.session("matrix", 10), None, 3)  # type: ignore[arg-type]  # nothing is loaded


def test_the_published_costs_are_reproduced_and_said_to_be() -> None:
    assert [cost_per_million(rate, PRICE) for rate, _ in PUBLISHED] == pytest.approx([0.218, 0.211], abs=0.001)


def test_every_cell_is_measured_but_for_those_that_cannot_be(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def one(self: Bench, key: str, model: ModelFiles, cases: dict[str, Case]) -> dict[str, Found]:
        for name, case in cases.items():
            (first, *_) = case.requests
            measured.append((name, len(case.seats), case.effort.workers, first[0], len(first)))
        return {name: found(100.0, len(case.requests[0])) for name, case in cases.items()}

    longest = {CPU: 512, INT8: 256}
    monkeypatch.setattr(Bench, "facts", lambda self, system, model: Facts("made up", 1, longest[system], 0))
    monkeypatch.setattr(Bench, "accuracy", lambda self, *arguments: {})
    monkeypatch.setattr(Bench, "measure", one)
    monkeypatch.setattr(matrix, "ExactTexts", Exact)
    monkeypatch.setattr(bench, "processes", type("None", (), {"keep": lambda self, seats, model: None})())
    result = MatrixResult(MODEL, "shown")
    with bench.session:
        measure(bench, result, [CPU, INT8], FULL)
    assert sorted(measured) == sorted(
        (system.name, 1, workers, f"{tokens} tokens", batch)
        for system in (CPU, INT8)
        for tokens in (256, 512)
        if tokens <= longest[system]
        for batch in (1, 16, 32)
        for workers in (1, 2)
    )
    assert len(result.cells) == len(measured) == 18
    too_long, one_core = bench.skipped.items()
    assert one_core == (("all/Mini LM: 2 models", "2 processes need a core each, and --cpus gives 1"), 24)
    assert too_long == (("all/Mini LM, embedctl cpu-int8: sequence 512", "the model takes 256 tokens at most"), 6)


def test_the_report_has_the_cells_the_costs_and_what_was_left_out(bench: Bench) -> None:
    result = MatrixResult(
        MODEL, "all-MiniLM", engines={CPU: "packed"}, accuracy={CPU.name: dict.fromkeys(_FIGURES, 0.5)}
    )
    result.cells = [MatrixCell(CPU, 1, 1, 512, found(20.0, 16)), MatrixCell(CPU, 1, 1, 256, found(50.0, 1))]
    bench.skip("2 models", "too few cores", 24)
    with bench.session:
        made = report([result], bench, FULL)
    tables = {table.name: table for table in made.tables}
    assert list(tables) == ["published", "all-Mini-LM-cells", "all-Mini-LM-accuracy", "left-out"]
    first, second = tables["all-Mini-LM-cells"].rows
    assert (first["sequence"], first["batch"], second["sequence"], second["batch"]) == (256, 1, 512, 16)
    assert first["p99_ms"] == pytest.approx(20)
    assert first["cost_per_million"] == pytest.approx(cost_per_million(50.0, PRICE))
    assert _keys(tables["all-Mini-LM-cells"]) <= set(first)
    assert all(row["_published"] for row in tables["published"].rows)
    assert tables["left-out"].rows == [{"what": "2 models", "why": "too few cores", "cells": 24}]
    assert [claim.met for claim in made.claims] == [True, True]
    assert [plot.name for plot in made.plots] == ["all-Mini-LM-throughput", "all-Mini-LM-latency", "all-Mini-LM-cost"]
    assert any("not this machine's" in note for note in made.notes)


def test_without_a_price_nothing_costs(bench: Bench) -> None:
    result = MatrixResult(MODEL, "m", cells=[MatrixCell(CPU, 1, 1, 256, found(50.0, 1))])
    wanted = asked(bench.asked.output, price=None)
    with bench.session:
        made = report([result], Bench(wanted, bench.session, bench.processes, 3), FULL)
    assert "cost_per_million" not in _keys(made.tables[1])
    assert [plot.name for plot in made.plots] == ["all-Mini-LM-throughput", "all-Mini-LM-latency"]


_FIGURES = ("max_abs_error", "min_cosine", "mean_cosine")


def _keys(table: Table) -> set[str]:
    return {column.key for column in table.columns}
