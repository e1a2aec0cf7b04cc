"""The search for a token budget and a way to share CPUs out, with made-up rates; and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from embedctl_config.hardware import HardwareClass
from embedctl_workers.commands import tune as tune_module
from embedctl_workers.commands.tune import Split, _search, _shares, tune
from embedctl_workers.machine import devices
from embedctl_workers.models import tuning
from embedctl_workers.models.tuning import DEFAULT_TOKEN_BUDGET, Tuned, load_tuned, save_tuned, token_budget

CPU = HardwareClass()
FOUND = Tuned(budgets={1: 512, 2: 2048}, workers=2, threads=1, cpus=2, tokens_per_s=9000.0)


def test_what_was_tuned_is_used_by_workers_with_as_many_threads(tmp_path: Path) -> None:
    save_tuned(FOUND, CPU, "f1", tmp_path)
    assert load_tuned(CPU, "f1", tmp_path) == FOUND
    assert token_budget(CPU, "f1", threads=1, cache=tmp_path, default=DEFAULT_TOKEN_BUDGET) == 512
    assert token_budget(CPU, "f1", threads=2, cache=tmp_path, default=DEFAULT_TOKEN_BUDGET) == 2048
    assert token_budget(CPU, "f1", threads=4, cache=tmp_path, default=DEFAULT_TOKEN_BUDGET) == DEFAULT_TOKEN_BUDGET


def test_the_classs_own_budget_wins(tmp_path: Path) -> None:
    save_tuned(FOUND, CPU, "f1", tmp_path)
    assert (
        token_budget(HardwareClass(token_budget=77), "f1", threads=1, cache=tmp_path, default=DEFAULT_TOKEN_BUDGET)
        == 77
    )


@pytest.mark.parametrize(
    ("hardware", "fingerprint"),
    [(CPU, "f2"), (HardwareClass(backend="onnx"), "f1"), (HardwareClass(options={"engine": "padded"}), "f1")],
    ids=["another model", "another backend", "other options"],
)
def test_what_was_tuned_for_something_else_is_not_used(
    tmp_path: Path, hardware: HardwareClass, fingerprint: str
) -> None:
    save_tuned(FOUND, CPU, "f1", tmp_path)
    assert (
        token_budget(hardware, fingerprint, threads=1, cache=tmp_path, default=DEFAULT_TOKEN_BUDGET)
        == DEFAULT_TOKEN_BUDGET
    )


def test_what_was_tuned_on_another_kind_of_cpu_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tuned(FOUND, CPU, "f1", tmp_path)
    monkeypatch.setattr(tuning, "cpu_identity", lambda: "another")
    assert load_tuned(CPU, "f1", tmp_path) is None


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"budgets": {"x": 1}}', "\x00"])
def test_a_damaged_file_is_named_and_defaults_hold(
    tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_tuned(FOUND, CPU, "f1", tmp_path)
    path.write_text(damaged)
    assert token_budget(CPU, "f1", threads=1, cache=tmp_path, default=DEFAULT_TOKEN_BUDGET) == DEFAULT_TOKEN_BUDGET
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    ("cpus", "sizes"),
    [({0}, [[1]]), ({0, 1}, [[2], [1, 1]]), ({1, 2, 5}, [[3]]), (set(range(4)), [[4], [2, 2], [1] * 4])],
    ids=str,
)
def test_cpus_are_shared_out_in_equal_parts(cpus: set[int], sizes: list[list[int]]) -> None:
    found = list(_shares(frozenset(cpus)))
    assert [[len(share) for share in shares] for shares in found] == sizes
    assert all(frozenset().union(*shares) == cpus for shares in found)


def test_a_larger_budget_must_be_worth_its_memory() -> None:
    split = Split((frozenset({0}),), 1, {256: 90.0, 512: 99.0, 1024: 100.0, 2048: 100.5})
    assert (split.best_budget, split.best_rate) == (512, 99.0)


def test_every_budget_is_asked_as_often_and_a_slow_round_decides_nothing() -> None:
    asked: list[int] = []

    def ask(budget: int) -> float:
        asked.append(budget)
        return 1.0 if len(asked) <= 6 else float(budget)

    assert _search(ask) == {budget: float(budget) for budget in tune_module._BUDGETS}
    assert {asked[1:].count(budget) for budget in tune_module._BUDGETS} == {tune_module._ROUNDS}


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    measured = []
    rate = {1: 100.0, 2: 150.0, 4: 120.0}

    @contextmanager
    def fake(hardware: object, model: object, shares: Sequence[object]) -> Iterator[tuple[dict[str, object], object]]:
        measured.append(len(shares))
        facts = {"fingerprint": "f1", "engine": "made up", "threads": 4 // len(shares)}
        yield facts, lambda budget: rate[len(shares)] + (budget == 512)

    monkeypatch.setattr(tune_module, "_measured", fake)
    monkeypatch.setattr(devices, "usable_cpus", lambda _: frozenset(range(4)))
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(tmp_path))
    return measured


@pytest.mark.usefixtures("four_cpus")
def test_it_says_what_to_start_and_keeps_the_budgets(tmp_path: Path) -> None:
    done = CliRunner().invoke(tune, ["m"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-2:] == [
        "  embedctl worker --class cpu --model m --cpus 0-1",
        "  embedctl worker --class cpu --model m --cpus 2-3",
    ]
    kept = load_tuned(CPU, "f1", tmp_path)
    assert kept is not None
    assert kept.budgets == {4: 256, 2: 256, 1: 256}
    assert (kept.workers, kept.threads, kept.cpus) == (2, 2, 4)


def test_it_stops_where_more_workers_are_slower(four_cpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    CliRunner().invoke(tune, ["m"])
    assert four_cpus == [1, 2, 4]
    monkeypatch.setattr(devices, "usable_cpus", lambda _: frozenset(range(8)))
    four_cpus.clear()
    CliRunner().invoke(tune, ["m"])
    assert four_cpus == [1, 2, 4]


def test_budgets_for_other_thread_counts_are_kept(four_cpus: list[int], tmp_path: Path) -> None:
    save_tuned(Tuned({8: 4096}, 1, 8, 8, 1.0), CPU, "f1", tmp_path)
    assert json.loads(CliRunner().invoke(tune, ["m", "--json"]).output)["budgets"]["8"] == 4096
