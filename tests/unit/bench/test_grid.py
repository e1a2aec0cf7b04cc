"""`embedctl bench grid`: 192 cells, what is left out of them, and the report beside the published figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedctl_bench.grid import command as grid
from embedctl_bench.grid.command import FULL, measure
from embedctl_bench.grid.report import report
from embedctl_bench.grid.results import PUBLISHED, GridPlace, GridResult
from embedctl_bench.measuring.cells import Bench, Case, Found
from embedctl_bench.measuring.sampled import Facts, Samples
from embedctl_bench.peers.registry import FLOOR, PEERS, TRANSFORMERS, backend_of
from embedctl_bench.report.report import Report
from embedctl_workers.models.files import ModelFiles
from tests.support.bench import Exact, asked, steady

CPU, INFINITY = backend_of("cpu"), PEERS["infinity"]
MODEL = ModelFiles("m", Path(), "f" * 64)


def found(rate: float, batch: int = 1, samples: int = 200) -> Found:
    steps = (0.1 * batch / rate, 0.8 * batch / rate, 0.1 * batch / rate)
    return Found(Samples(rate, [batch / rate] * samples, *steps), steady(rate), batch)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    wanted = asked(tmp_path, cpus=frozenset({0, 1}))
    processes = type("None", (), {"keep": lambda self, seats, model: None})()
    return Bench(wanted, wanted.session("grid", 10), processes, 3)


def made(bench: Bench, result: GridResult) -> Report:
    with bench.session:
        return report([result], bench, FULL, ["fastembed"])


def test_there_are_192_cells() -> None:
    assert len(FULL.cores) * FULL.cells == 192


def test_cells_that_the_machine_has_no_cores_for_are_not_planned() -> None:
    # Of two classes, transformers and the floor: facts of all, accuracy of the classes, and three rounds of cells.
    assert FULL.steps(4, cores=2) == 4 + 2 + 4 * 96 * 3
    assert FULL.steps(4, cores=8) == 4 + 2 + 4 * 192 * 3


def test_what_the_machine_has_no_cores_for_and_the_model_no_positions_is_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def one(self: Bench, key: str, model: ModelFiles, cases: dict[str, Case]) -> dict[str, Found]:
        measured.append((key, {name: [sorted(seat.cpus) for seat in case.seats] for name, case in cases.items()}))
        return {name: found(100.0, len(case.requests[0])) for name, case in cases.items()}

    longest = {CPU: 256, TRANSFORMERS: 256, FLOOR: 1 << 30}
    monkeypatch.setattr(Bench, "facts", lambda self, system, model: Facts("made up", 1, longest[system], 0))
    monkeypatch.setattr(Bench, "accuracy", lambda self, *arguments: {})
    monkeypatch.setattr(Bench, "measure", one)
    monkeypatch.setattr(grid, "ExactTexts", Exact)
    monkeypatch.setattr(grid, "cores_of", lambda cpus: [frozenset({cpu}) for cpu in sorted(cpus)])
    result = GridResult(MODEL, "shown")
    with bench.session:
        measure(bench, result, [CPU, TRANSFORMERS, FLOOR], FULL)
    assert len(measured) == len(result.cells) == 2 * 6 * 6
    names = [CPU.name, TRANSFORMERS.name, FLOOR.name]
    assert measured[0] == ("1 cores/8 tokens/batch 1", {name: [[0]] for name in names})
    assert measured[-1] == ("2 cores/256 tokens/batch 32", {name: [[0, 1]] for name in names})
    assert bench.skipped == {
        ("m: 384 tokens", "it takes 256 at most"): 12,
        ("m: 512 tokens", "it takes 256 at most"): 12,
        ("m: 4 cores", "--cpus 0-1 has 2"): 48,
        ("m: 8 cores", "--cpus 0-1 has 2"): 48,
    }
    assert len(result.cells) + sum(bench.skipped.values()) == 192
    assert list(result.systems) == [CPU, TRANSFORMERS], "the floor is no system"


@pytest.fixture
def result() -> GridResult:
    """Ours is 4.5 × transformers everywhere, but 3 × at 8 tokens, and behind a peer in one cell."""
    whole = GridResult(MODEL, "shown", systems={CPU: "packed", TRANSFORMERS: "torch", INFINITY: "torch"})
    for length in PUBLISHED:
        ours = 300.0 if length == 8 else 450.0
        whole.cells[GridPlace(2, length, 1)] = {
            CPU.name: found(ours),
            TRANSFORMERS.name: found(100.0),
            INFINITY.name: found(500.0 if length == 8 else 90.0),
            FLOOR.name: found(900.0),
        }
    whole.cells[GridPlace(1, 8, 2)] = {CPU.name: found(10.0, 2, samples=99), TRANSFORMERS.name: found(5.0, 2)}
    return whole


def test_the_published_rows_stand_beside_ours_and_less_is_bold(bench: Bench, result: GridResult) -> None:
    (table,) = (table for table in made(bench, result).tables if table.name == "m-beside")
    assert len(table.rows) == 8 * (3 + 2)
    first = table.rows[:5]
    assert [row["system"] for row in first] == [
        "embedctl cpu",
        "transformers",
        "infinity",
        "HF Infinity, as published",
        "transformers, as published",
    ]
    assert [row["requests_per_s"] for row in first] == [300, 100, 500, 248, 49]
    assert first[0]["_bold"], "3 × here and 5.06 × there"
    assert [row.get("_published", False) for row in first] == [False, False, False, True, True]
    assert not any(row["_bold"] for row in table.rows[5:] if row["system"] == "embedctl cpu")


def test_claims_are_met_or_explained(bench: Bench, result: GridResult) -> None:
    overall, by_length = made(bench, result).claims
    assert (overall.ours, overall.met) == ("3.00–4.50 ×, median 4.50", False)
    assert "At 8 tokens a request takes 3.33 ms: 0.33 before the model, 2.67 in it, 0.33 after it" in overall.why
    assert "11%" in overall.why
    assert "more than 9.00 ×" in overall.why
    assert (by_length.ours, by_length.met) == ("as much or more at 7 of 8 lengths", False)
    assert by_length.why == "Less at 8 tokens."


def test_a_system_that_is_ahead_is_named_in_bold(bench: Bench, result: GridResult) -> None:
    notes = made(bench, result).notes
    ahead = "**m: infinity is ahead of embedctl cpu in 1 of 8 cells, by up to 1.67 × (2 cores, 8 tokens, batch 1).**"
    assert ahead in notes
    assert not any("transformers is ahead" in note for note in notes)
    assert "Not installed, and so not measured: fastembed (`--peers` installs them)." in notes


def test_a_system_that_promises_less_is_compared_with_its_like(bench: Bench) -> None:
    int8, other = backend_of("cpu-int8"), PEERS["ctranslate2-int8"]
    result = GridResult(MODEL, "shown", systems=dict.fromkeys((CPU, int8, other), "made up"))
    rates = {CPU: 100.0, int8: 200.0, other: 300.0}
    result.cells[GridPlace(2, 8, 1)] = {system.name: found(rate) for system, rate in rates.items()}
    ahead = [note for note in made(bench, result).notes if "is ahead of" in note]
    assert len(ahead) == 1
    assert "ctranslate2-int8 is ahead of embedctl cpu-int8 in 1 of 1 cells, by up to 1.50 ×" in ahead[0]


def test_every_cell_has_its_latencies_steps_and_shares(bench: Bench, result: GridResult) -> None:
    whole = made(bench, result)
    (table,) = (table for table in whole.tables if table.name == "m-cells")
    assert len(table.rows) == 8 * 3 + 2
    first, last = table.rows[0], table.rows[-2]
    assert (first["times"], first["share_of_floor"]) == (3.0, pytest.approx(1 / 3))
    assert {"min_ms", "max_ms", "avg_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms"} <= set(first)
    assert first["p99_ms"] is not None
    assert (last["cores"], last["length"], last["batch"], last["p99_ms"]) == (1, 8, 2, None)
    (lead,) = (table for table in whole.tables if table.name == "m-cpu-lead")
    assert [row["batch_1"] for row in lead.rows] == [3.0] + [4.5] * 7
    assert {row["batch_32"] for row in lead.rows} == {None}
    names = [plot.name for plot in whole.plots]
    assert names == ["m-throughput", "m-cpu-lead", "m-cpu-latency", "m-floor"]


def test_a_run_that_was_stopped_at_once_still_has_a_report(bench: Bench) -> None:
    whole = made(bench, GridResult(MODEL, "shown"))
    assert not whole.tables
    assert not whole.plots
    assert not whole.claims
