"""The processes that `embedctl bench` measures: real ones, on the dummy backend and on small models."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from embedctl_bench.grid import command as grid
from embedctl_bench.grid.results import GridScope
from embedctl_bench.matrix import command as matrix
from embedctl_bench.matrix.results import MatrixScope
from embedctl_bench.measuring import sampled
from embedctl_bench.measuring.distance import distance
from embedctl_bench.measuring.runners import load_runner
from embedctl_bench.measuring.sampled import Effort, SampledProcess, SampledProcesses, Seat, sample_together
from embedctl_bench.peers import tuned
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import FLOOR, PEERS, SENTENCE_TRANSFORMERS, TRANSFORMERS, System, backend_of
from embedctl_bench.peers.tuned import TunedProcess, reference_of
from embedctl_bench.peers.workload import Workload
from embedctl_bench.study import command as study
from embedctl_bench.study.results import SETUPS, StudyScope
from embedctl_config.settings import Settings
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, fingerprint_of
from tests.support.tiny_models import Tiny
from tests.support.waiting import PATIENCE_S

#: A batch of at most 8 tokens takes 50 ms.
CONFIG = """
[classes.paced]
backend = "dummy"
token_budget = 8
options = { seconds_per_batch = 0.05 }

[classes.deadly]
backend = "dummy"
options = { poison = true }
"""
PACED, DEADLY = backend_of("paced"), backend_of("deadly")
MODEL = ModelFiles("dummy", Path("/nowhere"), "")
TEXTS = ["the text of a query", "a word", "it is in the model for that passage of text"]


@pytest.fixture(autouse=True)
def _configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    config = tmp_path / "embedctl.toml"
    config.write_text(CONFIG)
    monkeypatch.setenv("EMBEDCTL_CONFIG", str(config))
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(cache_folder))


@pytest.fixture
def seat() -> Seat:
    return Seat(frozenset({min(os.sched_getaffinity(0))}))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[SampledProcesses]:
    with SampledProcesses(tmp_path / "peers") as running:
        yield running


def test_requests_are_timed_one_by_one_until_the_effort_is_made(processes: SampledProcesses, seat: Seat) -> None:
    process = processes.get(PACED, MODEL, seat)
    assert (process.facts.threads, process.facts.max_tokens) == (1, 256)
    assert "token budget 8" in process.facts.engine
    # Four texts of four words are two batches.
    requests = [["one two three four"] * 4, ["five six seven eight"] * 4]
    samples = process.sample(requests, Effort(seconds=0.55, least=2, most=100))
    assert 2 <= len(samples.latencies) <= 6
    assert min(samples.latencies) >= 0.1
    assert samples.rate <= 40
    assert 0.1 <= samples.predict_s < samples.pre_s + samples.predict_s + samples.post_s <= np.mean(samples.latencies)
    assert len(process.sample(requests, Effort(seconds=60.0, least=1, most=3)).latencies) == 3
    assert len(process.sample(requests, Effort(seconds=0.0, least=4, most=9)).latencies) == 4
    assert process.count(requests) == (32, 32)
    assert process.peak_bytes() > 10e6


def test_two_requests_at_once_share_the_device(processes: SampledProcesses, seat: Seat) -> None:
    process = processes.get(PACED, MODEL, seat)
    samples = process.sample([["one two three four"] * 2], Effort(seconds=0.5, least=2, most=100, workers=2))
    # One batch each, one after the other on the device: each waits for the other's.
    assert np.median(samples.latencies) > 0.09
    assert samples.rate <= 2 / 0.05


@pytest.mark.needs("cores")
def test_two_processes_are_measured_at_once(processes: SampledProcesses, seat: Seat) -> None:
    other = Seat(frozenset({max(os.sched_getaffinity(0))}))
    both = [processes.get(PACED, MODEL, each) for each in (seat, other)]
    samples = sample_together(both, [["one two three four"] * 2], Effort(seconds=1.0, least=2, most=100))
    alone = 2 / 0.05  # the backend sleeps for 50 ms a batch, so two processes need no two CPUs
    assert alone < samples.rate <= 2 * alone


def test_a_process_that_dies_says_so_and_is_loaded_again(processes: SampledProcesses, seat: Seat) -> None:
    process = processes.get(DEADLY, MODEL, seat)
    with pytest.raises(Unavailable, match=r"^its process ended: "):
        process.encode(["crash-encoder"], 1)
    assert process.closed
    again = processes.get(DEADLY, MODEL, seat)
    assert again is not process
    assert again.encode(["harmless"], 1).shape == (1, 8)


def test_an_error_leaves_the_process_as_it_is(processes: SampledProcesses, seat: Seat) -> None:
    process = processes.get(DEADLY, MODEL, seat)
    with pytest.raises(Unavailable, match="RuntimeError: a text holds a word"):
        process.sample([["fail-encoder"]], Effort(1.0, 1, 1))
    assert not process.closed
    assert processes.get(DEADLY, MODEL, seat) is process


def test_what_cannot_be_loaded_is_not_tried_twice(
    processes: SampledProcesses, seat: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = backend_of("none-such")
    with pytest.raises(Unavailable, match="no hardware class 'none-such'"):
        processes.get(unknown, MODEL, seat)
    monkeypatch.setattr(SampledProcess, "__init__", lambda self, *arguments: pytest.fail("it is tried again"))
    with pytest.raises(Unavailable, match="no hardware class 'none-such'"):
        processes.get(unknown, MODEL, seat)


def test_processes_of_other_seats_are_closed_and_a_busy_one_at_once(processes: SampledProcesses, seat: Seat) -> None:
    process = processes.get(PACED, MODEL, seat)
    process.ask(do="sample", batches=[["one"]], seconds=600.0, least=1, most=9999, workers=1)
    began = time.monotonic()
    processes.keep([], MODEL)
    assert process.closed
    assert time.monotonic() - began < PATIENCE_S  # and not when its sample is over


@pytest.fixture
def _loaded_once(processes: SampledProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands of a test share their processes, because a process loads for longer than it is measured."""

    @contextmanager
    def shared(place: Path) -> Iterator[SampledProcesses]:
        yield processes

    def unclosed(system: System, model: ModelFiles, seat: Seat, place: Path) -> Any:
        process = processes.get(system, model, seat)
        return SimpleNamespace(
            facts=process.facts, sample=process.sample, peak_bytes=process.peak_bytes, close=lambda: None
        )

    for command in (grid, matrix, study):
        monkeypatch.setattr(command, "SampledProcesses", shared)
    monkeypatch.setattr(study, "SampledProcess", unclosed)


@pytest.fixture
def model(tiny_model: Callable[[Tiny], Path]) -> ModelFiles:
    folder = tiny_model(Tiny("distilbert", pooling="mean"))
    return ModelFiles("tiny", folder, fingerprint_of(folder))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_system_gives_the_models_vectors(
    processes: SampledProcesses, seat: Seat, tiny_model: Callable[[Tiny], Path]
) -> None:
    folder = tiny_model(Tiny("bert", pooling="cls"))
    model = ModelFiles("tiny", folder, fingerprint_of(folder))
    expected = processes.get(SENTENCE_TRANSFORMERS, model, seat).encode(TEXTS, 1)
    assert np.linalg.norm(expected, axis=1) == pytest.approx(1)
    for system in (TRANSFORMERS, backend_of("cpu")):
        process = processes.get(system, model, seat)
        assert np.abs(process.encode(TEXTS, 3) - expected).max() < 1e-5, system
        assert process.facts.model_bytes == (folder / "model.safetensors").stat().st_size
        assert process.facts.max_tokens == 32
    tokens, computed = processes.get(TRANSFORMERS, model, seat).count([TEXTS])
    assert tokens < computed, "it pads"
    assert processes.get(backend_of("cpu"), model, seat).count([TEXTS]) == (tokens, tokens)
    assert processes.get(SENTENCE_TRANSFORMERS, model, seat).count([TEXTS]) == (tokens, computed)
    floor = processes.get(FLOOR, model, seat)
    assert floor.count([TEXTS]) == (tokens, tokens)
    assert floor.sample([TEXTS], Effort(0.1, 2, 5)).rate > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_system_gives_the_vectors_of_a_model_with_another_pooling(model: ModelFiles, cache_folder: Path) -> None:
    # In this process: that children answer alike is tested with the other model.
    def run(system: System) -> Any:
        return load_runner(system.runner, system.hardware, Settings(), model, Host(1, cache_folder))

    reference, plain, ours, floor = map(run, (SENTENCE_TRANSFORMERS, TRANSFORMERS, backend_of("cpu"), FLOOR))
    expected, _ = reference.run(TEXTS)
    assert np.linalg.norm(expected, axis=1) == pytest.approx(1)
    for runner in (plain, ours):
        assert distance(runner.run(TEXTS)[0], expected)["max_abs_error"] < 1e-5, runner.engine
        assert runner.model_bytes == (model.folder / "model.safetensors").stat().st_size
        assert runner.max_tokens == 32
    tokens, computed = plain.count(TEXTS)
    assert tokens < computed, "it pads"
    assert ours.count(TEXTS) == (tokens, tokens)
    assert reference.count(TEXTS) == (tokens, computed)
    assert floor.count(TEXTS) == (tokens, tokens)
    floor.run(TEXTS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_loaded_once")
def test_whole_commands_write_their_reports_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: ModelFiles
) -> None:
    cpu = str(min(os.sched_getaffinity(0)))
    given = ["--model", str(model.folder), "--class", "cpu", "--cpus", cpu, "--quick", "-o", str(tmp_path)]
    small = GridScope((1, 2), (8, 64), (1, 2), Effort(0.05, 2, 5), Effort(0.05, 2, 5), rounds=2, repeats=0)
    monkeypatch.setattr(grid, "QUICK", small)
    monkeypatch.setattr(matrix, "QUICK", MatrixScope((1, 2), (16,), (1, 2), (1, 2), Effort(0.05, 2, 5), 2, 0))
    for name, command, more in (("grid", grid.command, ["--peers", "none"]), ("matrix", matrix.command, [])):
        done = CliRunner().invoke(command, [*more, *given])
        assert done.exit_code == 0, done.output
        report = json.loads((tmp_path / f"{name}.json").read_text())
        cells = next(table for table in report["tables"] if table["name"].endswith("-cells"))
        systems = {row["system"] for row in cells["rows"]}
        assert systems == ({"embedctl cpu", "transformers"} if name == "grid" else {"embedctl cpu"})
        assert all(row["texts_per_s"] > 0 and row["samples"] >= 2 for row in cells["rows"])
        left = next(table for table in report["tables"] if table["name"] == "left-out")
        assert any("2 cores" in row["what"] or "2 models" in row["what"] for row in left["rows"])
    kept = (tmp_path / "measurements.jsonl").read_text()
    monkeypatch.setattr(SampledProcesses, "get", lambda self, *arguments: pytest.fail("all of it is kept"))
    assert CliRunner().invoke(grid.command, ["--peers", "none", *given]).exit_code == 0
    assert (tmp_path / "measurements.jsonl").read_text() == kept


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_loaded_once")
def test_the_study_measures_its_five_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: ModelFiles
) -> None:
    effort = Effort(0.1, 2, 5)
    monkeypatch.setattr(study, "QUICK", StudyScope((1, 4), 40, 32, effort, effort, effort, rounds=2, repeats=0))
    cpu = str(min(os.sched_getaffinity(0)))
    given = ["--model", str(model.folder), "--class", "cpu-int8", "--cpus", cpu, "--quick", "-o", str(tmp_path)]
    done = CliRunner().invoke(study.command, [*given, "--price", "1"])
    assert done.exit_code == 0, done.output
    rows, sweep = json.loads((tmp_path / "study.json").read_text())["tables"][:2]
    ours = [row for row in rows["rows"] if not row.get("_published")]
    assert [row["setup"] for row in ours] == [setup.label for setup in SETUPS]
    assert all(row["texts_per_s"] > 0 and row["peak_mb"] > 20 and row["cost_per_million"] > 0 for row in ours)
    assert ours[0]["min_cosine"] == pytest.approx(1)
    assert ours[2]["weights_mb"] > ours[3]["weights_mb"], "int8 is smaller than fp32"
    assert {row["batch"] for row in sweep["rows"]} == {1, 4}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_peer_runs_with_the_adapters_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: SampledProcesses, seat: Seat, model: ModelFiles
) -> None:
    # Our own Python has this peer's library; on its path, the adapters are a package of their own.
    for module in (sampled, tuned):
        monkeypatch.setattr(module, "python_of", lambda environment, place: Path(sys.executable))
    expected = processes.get(SENTENCE_TRANSFORMERS, model, seat).encode(TEXTS, 1)
    peer = processes.get(PEERS["st-torch"], model, seat)
    assert distance(peer.encode(TEXTS, 3), expected)["max_abs_error"] < 1e-5
    assert peer.facts.engine.startswith("st-torch, 1×1 in fp32, backend torch, batch ")

    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    copy = Model.in_folder("tiny", model.folder)
    workload = Workload("w", tmp_path / "texts.json", copy.lengths(TEXTS), chunk=8)
    process = TunedProcess(PEERS["st-torch"], copy, workload, sorted(seat.cpus), tmp_path)
    try:
        assert len(process.tried) == 4, "settings of two processes need two CPUs"
        assert all(each["seconds"] > 0 for each in process.tried)
        done = process.encode()
        assert distance(done.vectors, expected)["max_abs_error"] < 1e-5
        assert done.tokens == sum(copy.lengths(TEXTS))
    finally:
        process.close()
    reference = reference_of(copy, workload, sorted(seat.cpus), tmp_path)
    assert distance(reference, expected)["max_abs_error"] < 1e-5
    assert len(list(tmp_path.glob("reference/*.npy"))) == 1
