"""`embedctl bench study`: what ONNX, int8 and batching bring over torch one text at a time, as a study published it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from embedctl_bench.asking import common, conclude
from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.cells import Bench, Case, seats_on
from embedctl_bench.measuring.models import model_files, peers_folder
from embedctl_bench.measuring.sampled import Effort, SampledProcess, SampledProcesses
from embedctl_bench.measuring.sampling import REPEATS
from embedctl_bench.measuring.shapes import describe
from embedctl_bench.measuring.texts import sentences
from embedctl_bench.peers.registry import FLOOR, System, backend_of
from embedctl_bench.study.report import report
from embedctl_bench.study.results import BATCH, INT8, ONNX, SETUPS, TORCH, Setup, StudyResult, StudyScope
from embedctl_config.errors import EmbedctlError
from embedctl_workers.models.files import ModelFiles

#: The requests that a process answers before its memory is read.
_MEMORY = Effort(seconds=20.0, least=2, most=50)
_UNLIMITED = 1 << 30

FULL = StudyScope(
    batches=(1, 2, 4, 8, 16, 32, 64),
    texts=512,
    requested=128,
    latency=Effort(180.0, 3, 200),
    sustained=Effort(10.0, 3, _UNLIMITED),
    sweep=Effort(6.0, 3, _UNLIMITED),
    rounds=3,
    repeats=REPEATS,
)
QUICK = StudyScope(
    batches=(1, 8, 32),
    texts=64,
    requested=64,
    latency=Effort(10.0, 2, 20),
    sustained=Effort(1.0, 2, _UNLIMITED),
    sweep=Effort(0.6, 2, _UNLIMITED),
    rounds=2,
    repeats=0,
)


@click.command("study")
@common()
def command(asked: Asked) -> None:
    """Gains from ONNX, int8 and batching over torch with one text at a time.

    Runs the five configurations of a published study of all-MiniLM-L6-v2, in the study's order, then the classes of
    --class. Measures 200 latencies, 10 s of sustained load, batches from 1 to 64, sizes, memory and cosines.
    """
    scope = QUICK if asked.quick else FULL
    setups = setups_for(asked.classes)
    systems = {setup.system for setup in setups}
    results: list[StudyResult] = []
    plan = len(asked.models) * scope.steps(len(setups), len(systems))
    with asked.session("study", plan) as session, SampledProcesses(peers_folder(asked.settings)) as processes:
        bench = Bench(asked, session, processes, scope.rounds, scope.repeats)
        try:
            for name in asked.models:
                results.append(StudyResult(model_files(name, asked.settings), describe(name)))
                measure(bench, results[-1], setups, scope)
        except KeyboardInterrupt:
            session.stopped = True
    conclude(report(results, setups, bench, scope), asked, session)


def setups_for(classes: Sequence[str]) -> list[Setup]:
    """The rows of the study, then those of the other classes asked for."""
    others = [system for name in classes if (system := backend_of(name)) not in (ONNX, INT8)]
    return [
        *SETUPS,
        *(
            Setup(f"class {system.hardware}, {'single' if batch == 1 else f'batch {batch}'}", system, batch)
            for system in others
            for batch in (1, BATCH)
        ),
    ]


def measure(bench: Bench, result: StudyResult, setups: Sequence[Setup], scope: StudyScope) -> None:
    """Fill the result, step by step."""
    model, texts = result.model, sentences(scope.texts)
    bench.processes.keep([], model)
    requested = texts[: scope.requested]
    for setup in setups:
        if memory := _memory(bench, setup, model, requested):
            result.memory[setup] = memory
    able = list(result.memory)
    systems = list(dict.fromkeys(setup.system for setup in able))
    if TORCH not in systems:
        return  # there is nothing to compare with; a note says why
    requests = {setup.label: (setup.system, setup.batch) for setup in able}
    result.accuracy = bench.accuracy(requests, TORCH, model, texts)

    def case(system: System, batch: int, effort: Effort) -> Case:
        return Case(system, seats_on(system, bench.asked, 1), requests_of(requested, batch), effort)

    def cases(effort: Effort) -> dict[str, Case]:
        return {setup.label: case(setup.system, setup.batch, effort) for setup in able}

    result.latency = bench.measure("latency", model, cases(scope.latency))
    result.sustained = bench.measure("sustained", model, cases(scope.sustained))
    for batch in scope.batches:
        swept = {system.name: case(system, batch, scope.sweep) for system in [*systems, FLOOR]}
        found = bench.measure(f"sweep, batch {batch}", model, swept)
        result.sweep |= {(swept[name].system, batch): each for name, each in found.items()}
        for system in systems:
            if (padding := _padding(bench, system, model, requested, batch)) is not None:
                result.padding[system, batch] = padding


def requests_of(texts: Sequence[str], batch: int) -> list[list[str]]:
    """The texts in requests of `batch` texts; a rest that does not fill a request is left out."""
    return [list(texts[at : at + batch]) for at in range(0, len(texts) - batch + 1, batch)]


def _memory(bench: Bench, setup: Setup, model: ModelFiles, texts: Sequence[str]) -> Mapping[str, Any] | None:
    """`weights` and `peak` memory of a fresh process that answers some requests, in bytes, and its `engine`."""

    def measured() -> dict[str, Any]:
        (seat,) = seats_on(setup.system, bench.asked, 1)
        process = SampledProcess(setup.system, model, seat, peers_folder(bench.asked.settings))
        try:
            process.sample(requests_of(texts, setup.batch), _MEMORY)
            facts = process.facts
            return {"peak": process.peak_bytes(), "weights": facts.model_bytes, "engine": facts.engine}
        finally:
            process.close()

    try:
        return bench.session.step(f"{model.name}/{setup.label}/memory", measured)
    except EmbedctlError as error:
        bench.session.note(f"**Not measured: {setup.label}** with {model.name}: {error}")
        return None


def _padding(bench: Bench, system: System, model: ModelFiles, texts: Sequence[str], batch: int) -> float | None:
    def measured() -> float:
        tokens, computed = bench.alone(system, model).count(requests_of(texts, batch))
        return computed / tokens - 1

    try:
        return bench.session.step(f"{model.name}/{system.name}/padding in {batch}", measured)
    except EmbedctlError as error:
        bench.session.note(f"**Padding not measured: {system.name}** with {model.name}: {error}")
        return None
