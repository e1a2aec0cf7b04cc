"""The search for a token budget and a way to share CPUs out, with made-up rates; and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from embedctl_config.errors import ModelError, SettingsError, WorkerError
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass
from embedctl_config.settings import Settings
from embedctl_workers.commands import findings as findings_module
from embedctl_workers.commands import tune as tune_module
from embedctl_workers.commands import tune_gpu
from embedctl_workers.commands.findings import findings
from embedctl_workers.commands.tune import _search, _shares, tune
from embedctl_workers.commands.tune_gpu import Sharing
from embedctl_workers.machine import devices
from embedctl_workers.machine.devices import Accelerator
from embedctl_workers.machine.discovery import CpuSet, Machine
from embedctl_workers.models import tuning
from embedctl_workers.models.tuning import DEFAULT_TOKEN_BUDGET, Tuned, load_tuned, save_tuned, token_budget
from embedctl_workers.supervising.plan import PlannedWorker

CPU = HardwareClass()
FOUND = Tuned(budgets={1: 512, 2: 2048}, workers=2, threads=1, cpus=2, tokens_per_s=9000.0)


def test_what_was_tuned_is_used_by_workers_with_as_many_threads(tmp_path: Path) -> None:
    save_tuned(FOUND, CPU, "f1", tmp_path)
    assert load_tuned(CPU, "f1", tmp_path) == FOUND
    assert token_budget(CPU, "f1", threads=1, cache=tmp_path, default=DEFAULT_TOKEN_BUDGET) == 512
    assert token_budget(CPU, "f1", threads=2, cache=tmp_path, default=DEFAULT_TOKEN_BUDGET) == 2048
    assert token_budget(CPU, "f1", threads=4, cache=tmp_path, default=DEFAULT_TOKEN_BUDGET) == DEFAULT_TOKEN_BUDGET
    assert token_budget(HardwareClass(token_budget=77), "f1", threads=1, cache=tmp_path, default=1) == 77


def test_what_was_tuned_for_something_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tuned(FOUND, CPU, "f1", tmp_path)
    assert load_tuned(CPU, "f2", tmp_path) is None
    for other in (HardwareClass(backend="onnx"), HardwareClass(options={"engine": "padded"})):
        assert load_tuned(other, "f1", tmp_path) is None
    monkeypatch.setattr(tuning, "cpu_identity", lambda: "another")
    assert load_tuned(CPU, "f1", tmp_path) is None


IMPOSSIBLE = '{"budgets": {}, "workers": %s, "threads": 1, "cpus": 4, "tokens_per_s": 1.0}'


@pytest.mark.parametrize("damaged", ["", "[]", '{"budgets": {"x": 1}}', IMPOSSIBLE % '"4"', IMPOSSIBLE % "0"])
def test_a_damaged_file_is_named(tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture) -> None:
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


# On a GPU

GPU = HardwareClass(device="gpu", backend="torch-gpu")
A100 = Accelerator("gpu", 0, "GPU-0", "A100", memory=81920)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, float | None]:
    """A machine with a GPU and eight CPUs, and the rate by the number of workers; None: they don't fit."""
    rates: dict[int, float | None] = {1: 100.0, 2: 190.0, 4: 210.0, 8: 212.0}

    def measure(workers: tuple[PlannedWorker, ...]) -> Sharing:
        assert {each.sharing for each in workers} == {len(workers)}
        rate = rates[len(workers)]
        if rate is None:
            raise ModelError("the measuring process ended")
        return Sharing(workers, rate, "made up", "f1")

    (tmp_path / "embedctl.toml").write_text("[classes.gpu]\ntoken_budget = 4096\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune_gpu, "_measure", measure)
    monkeypatch.setattr(tune_module, "choose_accelerator", lambda *_, gpu: A100)
    monkeypatch.setattr(devices, "usable_cpus", lambda _: frozenset(range(8)))
    monkeypatch.setattr(tune_gpu, "cores_of", lambda cpus: [frozenset({cpu}) for cpu in sorted(cpus)])
    monkeypatch.setattr(
        tune_gpu, "discover", lambda: Machine([CpuSet(tuple(frozenset({at}) for at in range(4)), 4)], [A100])
    )
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(tmp_path))
    return rates


def tuned_on_gpu(*options: str) -> tuple[list[str], Tuned | None]:
    done = CliRunner().invoke(tune, ["m", "--class", "gpu", *options])
    assert done.exit_code == 0, done.output
    return done.output.splitlines(), load_tuned(SHIPPED_CLASSES["gpu"], "f1", Path.cwd(), A100)


@pytest.mark.usefixtures("one_gpu")
def test_more_workers_on_a_gpu_are_measured_as_long_as_they_are_faster() -> None:
    said, kept = tuned_on_gpu("--cpus", "0-7")
    assert said == [
        "1 worker (made up): 100 tokens/s",
        "2 workers (made up): 190 tokens/s",
        "4 workers (made up): 210 tokens/s",
        "8 workers (made up): 212 tokens/s",
        "best: 4 workers, on GPUs like this one with 8 CPUs. Start:",
        *(
            f"  embedctl worker --class gpu --gpu GPU-0 --gpu-workers 4 --cpus {first}-{first + 1} --model m"
            for first in range(0, 8, 2)
        ),
    ]
    assert kept == Tuned(budgets={}, workers=4, threads=2, cpus=8, tokens_per_s=210.0)


@pytest.mark.usefixtures("one_gpu")
def test_the_cpus_are_those_that_up_would_give_and_each_worker_has_a_core() -> None:
    said, kept = tuned_on_gpu()
    assert said[-1] == "  embedctl worker --class gpu --gpu GPU-0 --gpu-workers 4 --cpus 3 --model m"
    assert kept is not None
    assert (kept.workers, kept.cpus) == (4, 4)


def test_workers_that_do_not_fit_end_the_search(one_gpu: dict[int, float | None]) -> None:
    one_gpu[4] = None
    said, kept = tuned_on_gpu("--cpus", "0-7")
    assert "4 workers: not measured, see the message above" in said
    assert kept is not None
    assert kept.workers == 2
    one_gpu[1] = None
    done = CliRunner().invoke(tune, ["m", "--class", "gpu"])
    assert isinstance(done.exception, ModelError)


def test_a_neuron_core_has_one_worker() -> None:
    done = CliRunner().invoke(tune, ["m", "--class", "neuron"])
    assert isinstance(done.exception, SettingsError)
    assert "one worker on each Neuron core: there is nothing to tune" in str(done.exception)


@pytest.mark.usefixtures("four_cpus")
def test_what_was_found_is_told_for_each_class_and_kind_of_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(cache_dir=str(tmp_path))
    monkeypatch.setattr(findings_module, "find_gpus", lambda: pytest.fail("a tool is run though nothing was found"))
    assert findings(settings, "f1") == []
    save_tuned(FOUND, CPU, "f1", tmp_path)
    save_tuned(Tuned({}, 4, 1, 16, 1234567.0), settings.classes["gpu"], "f1", tmp_path, A100)
    a10 = replace(A100, index=1, uid="GPU-1", name="A10")
    monkeypatch.setattr(findings_module, "find_gpus", lambda: [A100, replace(A100, index=2, uid="GPU-2"), a10])
    assert [(each.hardware, str(each)) for each in findings(settings, "f1")] == [
        (
            "cpu",
            "2 workers × 1 thread, with 2 CPUs: 9,000 tokens/s; token budget 512 with 1 thread, 2048 with 2 threads",
        ),
        ("gpu", "4 workers on each A100, with 16 CPUs: 1,234,567 tokens/s"),
    ]
    assert [each.as_json()["gpu"] for each in findings(settings, "f1")] == [None, "A100"]

    def broken() -> list[Accelerator]:
        raise WorkerError("NVIDIA's driver says: no")

    monkeypatch.setattr(findings_module, "find_gpus", broken)
    assert [each.hardware for each in findings(settings, "f1")] == ["cpu"]
