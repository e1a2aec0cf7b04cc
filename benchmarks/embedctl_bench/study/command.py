"""`embedctl bench study`: what ONNX, int8 and batching bring over torch one text at a time, as a study published it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from embedctl_bench.asking import Asked, common, conclude
from embedctl_bench.measuring.cells import Bench, Case, Found, model_files, peers_folder, seats_on
from embedctl_bench.measuring.engines import CLASS, FLOOR, SENTENCE_TRANSFORMERS, Effort, Engine, Engines, System
from embedctl_bench.measuring.sampling import REPEATS
from embedctl_bench.measuring.shapes import describe
from embedctl_bench.measuring.texts import sentences
from embedctl_config.errors import EmbedctlError
from embedctl_workers.models.files import ModelFiles

TORCH, ONNX, INT8 = System(SENTENCE_TRANSFORMERS), System(CLASS, "onnx"), System(CLASS, "cpu-int8")
MATRIX_PRODUCTS = System(FLOOR)
BATCH = 32
#: Requests that a process answers, for so many seconds at most, before its memory is read.
_MEMORY = Effort(seconds=20.0, least=2, most=50)


@dataclass(frozen=True, slots=True)
class Setup:
    """A row of the study.

    Attributes:
        published: texts/s; 0 for a row that the study does not have.
    """

    label: str
    system: System
    batch: int
    published: float = 0.0


#: The five of the study, in its order.
SETUPS = (
    Setup("torch, single", TORCH, 1, 68),
    Setup("torch, batch 32", TORCH, BATCH, 195),
    Setup("ONNX, single", ONNX, 1, 151),
    Setup("ONNX int8, single", INT8, 1, 234),
    Setup("ONNX int8, batched", INT8, BATCH, 602),
)
_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is measured: the efforts are of all rounds together.

    Attributes:
        texts: that vectors are compared of; requests are made of the first of them, as many as a round gets through
            several times, so that fast and slow systems see the same.
    """

    batches: Sequence[int]
    texts: int
    requested: int
    latency: Effort
    sustained: Effort
    sweep: Effort
    rounds: int
    repeats: int

    def steps(self, setups: int, systems: int) -> int:
        """Of a session, for one model."""
        of_setups = setups * (2 + 2 * self.rounds)
        return of_setups + len(self.batches) * (systems + (systems + 1) * self.rounds)


FULL = Scope(
    batches=(1, 2, 4, 8, 16, 32, 64),
    texts=512,
    requested=128,
    latency=Effort(180.0, 3, 200),
    sustained=Effort(10.0, 3, _UNLIMITED),
    sweep=Effort(6.0, 3, _UNLIMITED),
    rounds=3,
    repeats=REPEATS,
)
QUICK = Scope(
    batches=(1, 8, 32),
    texts=64,
    requested=64,
    latency=Effort(10.0, 2, 20),
    sustained=Effort(1.0, 2, _UNLIMITED),
    sweep=Effort(0.6, 2, _UNLIMITED),
    rounds=2,
    repeats=0,
)


@dataclass(slots=True)
class Result:
    """All that was measured of one model; what could not be measured is missing.

    Attributes:
        memory: bytes of the `weights` and of the `peak`, and the `engine`.
        latency, sustained, accuracy: by a setup's label.
        sweep: by system and batch.
        padding: the same; positions computed for nothing, as a share of the tokens.
    """

    model: ModelFiles
    shown: str
    memory: dict[Setup, Mapping[str, Any]] = field(default_factory=dict)
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    latency: Mapping[str, Found] = field(default_factory=dict)
    sustained: Mapping[str, Found] = field(default_factory=dict)
    sweep: dict[tuple[System, int], Found] = field(default_factory=dict)
    padding: dict[tuple[System, int], float] = field(default_factory=dict)

    def times_first(self, setup: Setup) -> float | None:
        """How many times the sustained rate of the study's first row."""
        found, first = self.sustained.get(setup.label), self.sustained.get(SETUPS[0].label)
        return found.times(first) if found and first else None

    def is_behind(self, setup: Setup) -> bool:
        """Whether it is a smaller multiple of the first row than published."""
        times = self.times_first(setup)
        return times is not None and times < times_published(setup)


def times_published(setup: Setup) -> float:
    """How many times the published rate of the first row; 0 for a row that the study does not have."""
    return setup.published / SETUPS[0].published


@click.command("study")
@common()
def command(asked: Asked) -> None:
    """What ONNX, int8 and batching bring over torch with one text at a time.

    The five configurations of a published study of all-MiniLM-L6-v2, in its order, and the classes asked for beside
    them: 200 latencies, 10 s of sustained load, batches from 1 to 64, sizes, memory and cosines.
    """
    from embedctl_bench.study.report import report

    scope = QUICK if asked.quick else FULL
    setups = setups_for(asked.classes)
    systems = {setup.system for setup in setups}
    results: list[Result] = []
    plan = len(asked.models) * scope.steps(len(setups), len(systems))
    with asked.session("study", plan) as session, Engines(peers_folder(asked.settings)) as engines:
        bench = Bench(asked, session, engines, scope.rounds, scope.repeats)
        try:
            for name in asked.models:
                results.append(Result(model_files(name, asked.settings), describe(name)))
                measure(bench, results[-1], setups, scope)
        except KeyboardInterrupt:
            session.stopped = True
    conclude(report(results, setups, bench, scope), asked, session)


def setups_for(classes: Sequence[str]) -> list[Setup]:
    """The study's rows, then those of the other classes asked for."""
    others = [system for name in classes if (system := System(CLASS, name)) not in (ONNX, INT8)]
    return [
        *SETUPS,
        *(
            Setup(f"class {system.hardware}, {'single' if batch == 1 else f'batch {batch}'}", system, batch)
            for system in others
            for batch in (1, BATCH)
        ),
    ]


def measure(bench: Bench, result: Result, setups: Sequence[Setup], scope: Scope) -> None:
    """Fill the result, step by step."""
    model, texts = result.model, sentences(scope.texts)
    bench.engines.keep([], model)
    requested = texts[: scope.requested]
    for setup in setups:
        if memory := _memory(bench, setup, model, requested):
            result.memory[setup] = memory
    able = list(result.memory)
    systems = list(dict.fromkeys(setup.system for setup in able))
    if TORCH not in systems:
        return  # there is nothing to compare with; why has been noted
    requests = {setup.label: (setup.system, setup.batch) for setup in able}
    result.accuracy = bench.accuracy(requests, TORCH, model, texts)

    def case(system: System, batch: int, effort: Effort) -> Case:
        return Case(system, seats_on(system, bench.asked, 1), requests_of(requested, batch), effort)

    def cases(effort: Effort) -> dict[str, Case]:
        return {setup.label: case(setup.system, setup.batch, effort) for setup in able}

    result.latency = bench.measure("latency", model, cases(scope.latency))
    result.sustained = bench.measure("sustained", model, cases(scope.sustained))
    for batch in scope.batches:
        swept = {system.name: case(system, batch, scope.sweep) for system in [*systems, MATRIX_PRODUCTS]}
        found = bench.measure(f"sweep, batch {batch}", model, swept)
        result.sweep |= {(swept[name].system, batch): each for name, each in found.items()}
        for system in systems:
            if (padding := _padding(bench, system, model, requested, batch)) is not None:
                result.padding[system, batch] = padding


def requests_of(texts: Sequence[str], batch: int) -> list[list[str]]:
    """The same texts for every batch, in requests of one size: what does not fill one is left out."""
    return [list(texts[at : at + batch]) for at in range(0, len(texts) - batch + 1, batch)]


def _memory(bench: Bench, setup: Setup, model: ModelFiles, texts: Sequence[str]) -> Mapping[str, Any] | None:
    """Size of the weights and peak of a fresh process that answers some requests, in bytes, and its engine."""

    def measured() -> dict[str, Any]:
        (seat,) = seats_on(setup.system, bench.asked, 1)
        engine = Engine(setup.system, model, seat, peers_folder(bench.asked.settings))
        try:
            engine.sample(requests_of(texts, setup.batch), _MEMORY)
            facts = engine.facts
            return {"peak": engine.peak_bytes(), "weights": facts.model_bytes, "engine": facts.engine}
        finally:
            engine.close()

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
