"""`embedctl bench grid`: cores × copies × lengths × batches, end to end, as Hugging Face measured Infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click

from embedctl_bench.asking import Asked, common, conclude, not_installed
from embedctl_bench.measuring.comparison import Load, Scene, SystemRuns, each_scene
from embedctl_bench.measuring.contenders import Contender, Ground, compete
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Effort
from embedctl_bench.peers.models import Model, describe, measured_model
from embedctl_bench.peers.registry import FLOOR, TRANSFORMERS, System, choose_peers, engine_of
from embedctl_bench.peers.tuned import Run
from embedctl_bench.peers.workload import kept
from embedctl_bench.report import Claim, Column, Report, Table
from embedctl_bench.texts.words import ExactTexts
from embedctl_bench.texts.workloads import make_workload
from embedctl_workers.machine.devices import cores_of, format_cpus

#: Texts whose vectors are compared, and with which systems choose their settings.
_CHECKED = 64
#: For a cell, all rounds together; the floor gets less, because it has no latencies.
_EFFORT, _FLOOR_EFFORT = Effort(10.0, 5, 200), Effort(1.5, 3, 200)
_QUICK_EFFORT = Effort(0.6, 2, 40)
_ROUNDS, _QUICK_ROUNDS = 3, 2
#: DistilBERT at 2 cores and batch 1: length → requests/s of HF Infinity, and of transformers.
INFINITY = {
    8: (248, 49),
    16: (212, 50),
    32: (150, 40),
    64: (97, 28),
    128: (55, 18),
    256: (27, 9),
    384: (17, 5),
    512: (12, 4),
}
INFINITY_CORES = 2
#: The least lead over transformers that the publication claims.
CLAIMED, CLAIMED_IN_WORDS = 4.0, "4–6 ×"
_LEFT_OUT = (Column("what", "left out"), Column("cells", "cells", 0), Column("why", "because"))

_BASE = ((TRANSFORMERS.name,), "plain transformers on torch in fp32")


@dataclass(frozen=True, slots=True)
class Axes:
    """What the cells are made of; `copies` of a model have a process each, and `lengths` are in tokens."""

    cores: Sequence[int]
    copies: Sequence[int]
    lengths: Sequence[int]
    batches: Sequence[int]

    def quick(self) -> Axes:
        """A few of each."""
        lengths, batches = few(self.lengths, (8, 64, 256)), few(self.batches, (1, 8))
        return Axes(few(self.cores, (1, 2)), self.copies[:1], lengths, batches)

    def loads(self, model: Model, rounds: int) -> list[Load]:
        """Those of the lengths that a model takes."""
        return [
            Load(f"{length} tokens, batch {batch}", rounds, batch, facts={"length": length, "batch": batch})
            for length, batch in product(self.lengths, self.batches)
            if length <= model.max_tokens
        ]

    def beyond(self, name: str, model: Model, seats: int) -> list[Mapping[str, object]]:
        """Rows of a table: the lengths that it does not take."""
        why, cells = f"{name} takes {model.max_tokens}", seats * len(self.batches)
        long = [each for each in self.lengths if each > model.max_tokens]
        return [{"what": f"{each} tokens", "why": why, "cells": cells} for each in long]


def _axis(name: str, what: str, default: Sequence[int]) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}",
        f"{name}_axis",
        type=click.IntRange(min=1),
        multiple=True,
        default=tuple(default),
        show_default=True,
        help=f"{what}. Can be repeated.",
        callback=lambda context, parameter, value: tuple(dict.fromkeys(value)),
    )


@click.command("grid")
@common
@_axis("cores", "Cores that each system runs on", (1, 2, 4, 8))
@_axis("copies", "Copies of the model, each in a process with its share of the cores", (1,))
@_axis("length", "Tokens of each text", tuple(INFINITY))
@_axis("batch", "Texts of a request", (1, 2, 4, 8, 16, 32))
def command(
    asked: Asked,
    cores_axis: Sequence[int],
    copies_axis: Sequence[int],
    length_axis: Sequence[int],
    batch_axis: Sequence[int],
) -> None:
    """Cores × copies × lengths × batches: as Hugging Face measured Infinity, and AWS Neuron.

    Each cell takes 10 seconds or 200 requests, one after the other; by default there are 192. Plain transformers and
    the other systems that are installed take turns with embedctl's engine. Cells that need more cores than this machine
    has are left out. For the shapes of the published models, use --model distilbert-shape and --model bge-base-shape.
    """
    axes = Axes(cores_axis, copies_axis, length_axis, batch_axis)
    if asked.quick:
        axes = axes.quick()
    peers, lacking = choose_peers(asked.peers, asked.place)
    systems = [FLOOR, *(engine_of(name, asked.settings) for name in asked.classes), TRANSFORMERS, *peers]
    rounds, effort = (_QUICK_ROUNDS, _QUICK_EFFORT) if asked.quick else (_ROUNDS, _EFFORT)
    seats, left_out = seats_for(asked, axes)
    steps = len(systems) + len(axes.lengths) * len(axes.batches) * rounds
    session = asked.session("grid", len(asked.models) * len(seats) * steps)
    scenes: list[Scene] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            model = measured_model(name, asked.settings, asked.place)
            texts = ExactTexts(model)
            workload = make_workload("W1", _CHECKED, model, asked.place)
            ground = asked.ground(model.name, model, workload, session)
            left_out += axes.beyond(name, model, len(seats))
            loads = axes.loads(model, rounds)
            for cores, copies in seats:
                where = f"{name}, {cores} core{'s' * (cores > 1)}" + (f", {copies} copies" if copies > 1 else "")
                scenes.append(Scene(where, model, describe(name), loads, _BASE))
                cpus = sorted(frozenset[int]().union(*cores_of(asked.cpus)[:cores]))
                key = f"{model.name}/{cores} cores/{copies} copies"
                own = [in_copies(system, copies) for system in systems]
                there = replace(ground, key=key, task=replace(ground.task, cpus=cpus))
                compete(scenes[-1], own, there, run_with(texts, effort, ground))
    report = Report(
        "Cores × copies × lengths × batches, end to end",
        workload_words(effort, rounds),
        tables=[Table("left-out", "What this machine or a model can't do", _LEFT_OUT, left_out)],
        claims=each_scene(scenes, claims_of),
        notes=not_installed(lacking),
    )
    conclude(asked, session, scenes, report, published_beside)


def workload_words(effort: Effort, rounds: int) -> str:
    """What is run, for the report."""
    return (
        "All texts of a request have exactly the same number of tokens, special ones included, so that no engine pads: "
        "words that are one token each, drawn with a fixed seed. A cell is "
        f"{effort.seconds:g} s or {effort.most} requests to each copy of the model, one after the other, whichever is "
        f"less, {effort.least} at least, in {rounds} rounds together. Times are end to end, from texts to vectors of "
        "unit length. `transformers` is its tokenizer with padding, its model on torch in fp32, and pooling by hand. "
        "embedctl is a worker's engine, called directly. The publication measured DistilBERT on "
        f"{INFINITY_CORES} cores; it does not say whether it counts pooling."
    )


def few(axis: Sequence[int], some: Sequence[int]) -> Sequence[int]:
    """Those of an axis that are among some, or else the first."""
    return [each for each in axis if each in some] or axis[:1]


def seats_for(asked: Asked, axes: Axes) -> tuple[list[tuple[int, int]], list[Mapping[str, object]]]:
    """The numbers of cores and copies that can be measured together; and a table's rows of the others."""
    seats, left_out, have = [], list[Mapping[str, object]](), len(cores_of(asked.cpus))
    cells = len(axes.lengths) * len(axes.batches)
    for cores, copies in product(axes.cores, axes.copies):
        if cores > have:
            why = f"--cpus {format_cpus(asked.cpus)} has {have}"
        elif copies > cores or (copies > 1 and asked.device != "cpu"):
            why = "each copy needs a core, and a device, of its own"
        else:
            seats.append((cores, copies))
            continue
        left_out.append({"what": f"{cores} cores, {copies} copies", "why": why, "cells": cells})
    return seats, left_out


def in_copies(system: System, copies: int) -> System:
    """The system in this number of processes; it chooses among the options of its settings with one process."""
    single = [each for each in system.settings if each.processes == 1]
    return replace(system, settings=tuple(replace(each, processes=copies) for each in single))


def run_with(texts: ExactTexts, effort: Effort, ground: Ground) -> Callable[[Load, Contender], Run]:
    """Answer requests of a cell again and again."""

    @cache
    def file(length: int, batch: int) -> Path:
        return kept(texts.requests(length, batch, max(4, 64 // batch)), ground.task.place, f"grid-{length}-{batch}")

    def run(load: Load, contender: Contender) -> Run:
        least = _FLOOR_EFFORT if contender.runs.floor and not ground.quick else effort
        seconds, latencies = contender.process().sample(file(**load.facts), least.share(load.rounds))
        return Run(seconds, load.facts["length"] * load.texts, () if contender.runs.floor else latencies)

    return run


def claims_of(scene: Scene) -> Iterator[Claim]:
    """The published lead over transformers, beside ours of the same rounds."""
    for system in (each for each in scene.runs if each.ours and _is_published(scene)):
        lead = {length: times for length, times in leads(scene, system).items() if length in INFINITY}
        if not lead:
            continue
        least = min(lead.values())
        yield Claim(
            f"{scene.name}, {system.label}: times transformers, one text a request",
            CLAIMED_IN_WORDS,
            f"{least:.2f}–{max(lead.values()):.2f} ×, median {median(lead.values()):.2f}",
            met=least >= CLAIMED,
            why=_why(scene, system, min(lead, key=lambda each: lead[each])),
        )
        behind = [length for length, times in lead.items() if times < times_published(length)]
        yield Claim(
            f"{scene.name}, {system.label}: the same against the published table, length by length",
            f"{times_published(512):.2f}–{times_published(8):.2f} ×",
            f"as much or more at {len(lead) - len(behind)} of {len(lead)} lengths",
            met=not behind,
            why=f"Less at {', '.join(map(str, behind))} tokens.",
        )


def _is_published(scene: Scene) -> bool:
    """Whether the publication is of this number of cores, and of one copy."""
    return scene.name.endswith(f", {INFINITY_CORES} cores")


def leads(scene: Scene, system: SystemRuns) -> dict[int, float]:
    """By length, the rate with one text a request as a multiple of transformers'."""
    found = {}
    for comparison in scene.measured():
        ours, base = comparison.find(system.name), comparison.baseline
        if comparison.load.texts == 1 and ours and base and ours.ratios(base):
            found[comparison.load.facts["length"]] = ours.times(base)
    return found


def _why(scene: Scene, system: SystemRuns, length: int) -> str:
    """How much could be gained at a length."""
    (load,) = (each for each in scene.loads if each.facts == {"length": length, "batch": 1})
    comparison = scene.on(load)
    floor, theirs = comparison.floor("fp32"), comparison.baseline
    if system.precision != "fp32" or not floor or not theirs or not theirs.ratios(floor):
        return ""
    share = theirs.times(floor)
    return (
        f"At {length} tokens, the matrix products alone, in fp32, would take {share:.0%} of transformers' time, so no "
        f"engine of that precision can be more than {1 / share:.2f} × as fast there, unless its products are faster."
    )


def times_published(length: int) -> float:
    """The published rate, as a multiple of transformers'."""
    infinity, transformers = INFINITY[length]
    return infinity / transformers


def published_beside(scene: Scene) -> list[Mapping[str, object]]:
    """The published rows of the lengths that were measured with one text a request."""
    lengths = {load.facts["length"] for load in scene.loads if load.texts == 1 and _is_published(scene)}
    return [
        {
            "system": f"{system}, published of DistilBERT on {INFINITY_CORES} cores",
            "length": length,
            "batch": 1,
            "texts_per_s": rate,
            "times": rate / INFINITY[length][1],
            "_published": True,
        }
        for length in INFINITY
        if length in lengths
        for system, rate in zip(("HF Infinity", "transformers"), INFINITY[length], strict=True)
    ]
