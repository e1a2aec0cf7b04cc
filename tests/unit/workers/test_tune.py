"""The search for a number of workers, with made-up rates; and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass
from embedctl_workers.commands import tune as tune_module
from embedctl_workers.commands import tune_search
from embedctl_workers.commands.tune import tune
from embedctl_workers.commands.tune_search import Sharing
from embedctl_workers.machine import devices
from embedctl_workers.machine.devices import Accelerator
from embedctl_workers.machine.discovery import CpuSet, Machine
from embedctl_workers.models import tuning
from embedctl_workers.models.tuning import Tuned, load_tuned, save_tuned
from embedctl_workers.supervising.plan import PlannedWorker

CPU = HardwareClass()
FOUND = Tuned(workers=2, threads=1, cpus=2, tokens_per_s=9000.0)


def test_what_was_tuned_for_something_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tuned(FOUND, CPU, "f1", tmp_path)
    assert load_tuned(CPU, "f1", tmp_path) == FOUND
    assert load_tuned(CPU, "f2", tmp_path) is None
    for other in (HardwareClass(backend="onnx"), HardwareClass(options={"engine": "padded"})):
        assert load_tuned(other, "f1", tmp_path) is None
    monkeypatch.setattr(tuning, "cpu_identity", lambda: "another")
    assert load_tuned(CPU, "f1", tmp_path) is None


IMPOSSIBLE = '{"workers": %s, "threads": 1, "cpus": 4, "tokens_per_s": 1.0}'


@pytest.mark.parametrize("damaged", ["", "[]", '{"budgets": {}}', IMPOSSIBLE % '"4"', IMPOSSIBLE % "0"])
def test_a_damaged_file_is_named(tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture) -> None:
    path = save_tuned(FOUND, CPU, "f1", tmp_path)
    path.write_text(damaged)
    assert load_tuned(CPU, "f1", tmp_path) is None
    assert str(path) in caplog.text


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[list[str]]]:
    """A machine with four CPUs; what was measured by turns on which of them."""
    measured = []

    def measure(ways: Sequence[tuple[PlannedWorker, ...]]) -> list[Sharing]:
        measured.append([[each.pinned.cpu_list for each in workers] for workers in ways])
        drift = len(measured)  # the machine becomes faster
        rates = {1: 100.0, 2: 150.0, 4: 151.0}
        return [Sharing(workers, drift * rates[len(workers)], "made up", "f1") for workers in ways]

    monkeypatch.setattr(tune_search, "_measure", measure)
    monkeypatch.setattr(devices, "usable_cpus", lambda _: frozenset(range(4)))
    monkeypatch.setattr(tune_search, "cores_of", lambda cpus: [frozenset({cpu}) for cpu in sorted(cpus)])
    monkeypatch.setattr(tune_search, "thread_count", len)
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(tmp_path))
    return measured


def test_it_says_what_to_start_and_keeps_what_was_found(four_cpus: list[list[list[str]]], tmp_path: Path) -> None:
    done = CliRunner().invoke(tune, ["m"])
    assert done.exit_code == 0, done.output
    one, two, four = ["0-3"], ["0-1", "2-3"], ["0", "1", "2", "3"]
    assert four_cpus == [[one], [one, two], [two, four]]
    assert done.output.splitlines()[1:] == [
        "2 workers × 2 threads (made up): 300 tokens/s",
        "4 workers × 1 thread (made up): 453 tokens/s",
        "best: 2 workers. Start:",
        "  embedctl worker --class cpu --cpus 0-1 --model m",
        "  embedctl worker --class cpu --cpus 2-3 --model m",
    ]
    assert load_tuned(CPU, "f1", tmp_path) == Tuned(workers=2, threads=2, cpus=4, tokens_per_s=450.0)


# On a GPU

A100 = Accelerator("gpu", 0, "GPU-0", "A100", memory=81920)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, float | None]:
    """A machine with a GPU and eight CPUs, and the rate by the number of workers; None: they don't fit."""
    rates: dict[int, float | None] = {1: 100.0, 2: 190.0, 4: 210.0, 8: 212.0}

    def measure(ways: Sequence[tuple[PlannedWorker, ...]]) -> list[Sharing]:
        [workers] = ways
        assert {each.sharing for each in workers} == {len(workers)}
        rate = rates[len(workers)]
        if rate is None:
            raise ModelError("the measuring process ended")
        return [Sharing(workers, rate, "made up", "f1")]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune_search, "_measure", measure)
    monkeypatch.setattr(tune_module, "choose_accelerator", lambda *_, gpu: A100)
    monkeypatch.setattr(devices, "usable_cpus", lambda _: frozenset(range(8)))
    monkeypatch.setattr(tune_search, "cores_of", lambda cpus: [frozenset({cpu}) for cpu in sorted(cpus)])
    monkeypatch.setattr(
        tune_search, "discover", lambda: Machine([CpuSet(tuple(frozenset({at}) for at in range(4)), 4)], [A100])
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
        "1 worker × 8 threads (made up): 100 tokens/s",
        "2 workers × 4 threads (made up): 190 tokens/s",
        "4 workers × 2 threads (made up): 210 tokens/s",
        "8 workers × 1 thread (made up): 212 tokens/s",
        "best: 4 workers on GPUs like this one with 8 CPUs. Start:",
        *(
            f"  embedctl worker --class gpu --gpu GPU-0 --gpu-workers 4 --cpus {first}-{first + 1} --model m"
            for first in range(0, 8, 2)
        ),
    ]
    assert kept == Tuned(workers=4, threads=2, cpus=8, tokens_per_s=210.0)


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
