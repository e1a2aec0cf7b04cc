"""`embedctl bench grid`: cores × lengths × batches, end to end, as Hugging Face measured Infinity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any

import click

from embedctl_bench.asking import Asked, common, conclude, not_installed
from embedctl_bench.measuring.comparison import Load, Scene
from embedctl_bench.measuring.contenders import compete
from embedctl_bench.peers.models import Model, describe, measured_model
from embedctl_bench.peers.registry import FLOOR, TRANSFORMERS, System, choose_peers, engine_of
from embedctl_bench.report import Report
from embedctl_bench.texts.words import exact_requests
from embedctl_bench.texts.workloads import make_workload
from embedctl_workers.machine.devices import cores_of

#: Texts whose vectors are compared, and with which systems choose their settings.
_CHECKED = 64
#: For a cell, all rounds together: so many operations, which a core does in some ten seconds, and so many requests.
_FLOP, _QUICK_FLOP = 1e12, 6e10
_LEAST, _MOST = 5, 200
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
_BASE = ((TRANSFORMERS.name,), "plain transformers on torch in fp32")


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
@_axis("length", "Tokens of each text", tuple(INFINITY))
@_axis("batch", "Texts of a request", (1, 2, 4, 8, 16, 32))
def command(asked: Asked, cores_axis: Sequence[int], length_axis: Sequence[int], batch_axis: Sequence[int]) -> None:
    """Cores × lengths × batches: as Hugging Face measured Infinity.

    Each cell has up to 200 requests, one after the other; by default there are 192 cells. Plain transformers and the
    other systems that are installed take turns with embedctl's engine. Cells that need more cores than this machine
    has are left out. For the shape of the published model, use --model distilbert-shape.
    """
    if asked.quick:
        cores_axis, length_axis = few(cores_axis, (1, 2)), few(length_axis, (8, 64, 256))
        batch_axis = few(batch_axis, (1, 8))
    peers, lacking = choose_peers(asked.peers, asked.place)
    engines = [engine_of(name, asked.settings) for name in asked.classes]
    systems = in_one_process([FLOOR, *engines, TRANSFORMERS, *peers])
    rounds = _QUICK_ROUNDS if asked.quick else _ROUNDS
    have = cores_of(asked.cpus)
    fit = [cores for cores in cores_axis if cores <= len(have)]
    left_out = [f"Left out: {cores} cores, because --cpus has {len(have)}." for cores in cores_axis if cores not in fit]
    steps = len(systems) + len(length_axis) * len(batch_axis) * rounds
    session = asked.session("grid", len(asked.models) * len(fit) * steps)
    scenes: list[Scene] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            model = measured_model(name, asked.settings, asked.place)
            workload = make_workload("W1", _CHECKED, model, asked.place)
            lengths = [each for each in length_axis if each <= model.max_tokens]
            long = [each for each in length_axis if each not in lengths]
            left_out += [f"Left out: {each} tokens, because {name} takes {model.max_tokens}." for each in long]
            loads = [cell(model, *each, quick=asked.quick) for each in product(lengths, batch_axis)]
            # The first request of a shape takes longer.
            warm_up = [each.asked[0] for each in loads]
            ground = asked.ground(model.name, model, workload, session, warm_up=warm_up)
            for cores in fit:
                on = f"{cores} core{'s' * (cores > 1)}"
                scenes.append(Scene(f"{name}, {on}", model, describe(name), loads, _BASE))
                cpus = sorted(frozenset[int]().union(*have[:cores]))
                there = replace(ground, key=f"{model.name}/{on}", task=replace(ground.task, cpus=cpus))
                compete(scenes[-1], systems, there)
    notes = [*left_out, *not_installed(lacking)]
    report = Report("Cores × lengths × batches, end to end", workload_words(rounds), notes=notes)
    conclude(asked, session, scenes, report, published_beside)


def cell(model: Model, length: int, batch: int, *, quick: bool) -> Load:
    """Requests of one caller, each of `batch` texts of `length` tokens."""
    rounds, flop = (_QUICK_ROUNDS, _QUICK_FLOP) if quick else (_ROUNDS, _FLOP)
    fits = flop / (model.flops_per_token * length * batch)
    asked = exact_requests(model, length, batch, ceil(min(max(_LEAST, fits), _MOST) / rounds))
    facts = {"length": length, "batch": batch}
    return Load.of(f"{length} tokens, batch {batch}", asked, rounds, callers=1, facts=facts)


def workload_words(rounds: int) -> str:
    """What is run, for the report."""
    return (
        "All texts of a request have exactly the same number of tokens, special ones included, so that no engine pads: "
        "words that are one token each, drawn with a fixed seed. A cell is the "
        "same requests for every system, one after the other: as many as a core answers in some ten seconds, "
        f"{_LEAST} to {_MOST} in {rounds} rounds together. Times are end to end, from texts to vectors of "
        "unit length. `transformers` is its tokenizer with padding, its model on torch in fp32, and pooling by hand. "
        "embedctl is a worker's engine, called directly. The publication measured DistilBERT on "
        f"{INFINITY_CORES} cores; it does not say whether it counts pooling."
    )


def few(axis: Sequence[int], some: Sequence[int]) -> Sequence[int]:
    """Those of an axis that are among some, or else the first."""
    return [each for each in axis if each in some] or axis[:1]


def in_one_process(systems: Sequence[System]) -> list[System]:
    """The systems without their settings of several processes: a request at a time has work for one."""
    return [replace(each, settings=tuple(way for way in each.settings if way.processes == 1)) for each in systems]


def published_beside(scene: Scene) -> list[Mapping[str, object]]:
    """The published rows of the lengths that were measured on as many cores with one text a request."""
    same_cores = scene.name.endswith(f", {INFINITY_CORES} cores")
    lengths = {load.facts["length"] for load in scene.loads if same_cores and load.facts["batch"] == 1}
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
