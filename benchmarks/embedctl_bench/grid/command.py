"""`embedctl bench grid`: cores × copies × lengths × batches, end to end, as Hugging Face measured Infinity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import product
from typing import Any

import click

from embedctl_bench.asking import Asked, common, conclude
from embedctl_bench.grid.report import INFINITY, GridPlace, GridResult, GridScope, report
from embedctl_bench.measuring.comparison import Run
from embedctl_bench.measuring.contenders import Contender, Ground, choose_settings, take_turns
from embedctl_bench.peers.environments import requirements_digest
from embedctl_bench.peers.models import describe, measured_model, peers_folder
from embedctl_bench.peers.registry import FLOOR, TRANSFORMERS, System, choose_peers, engine_of
from embedctl_bench.peers.tuned import Effort, reference_of
from embedctl_bench.peers.workload import kept
from embedctl_bench.texts.words import ExactTexts
from embedctl_bench.texts.workloads import make_workload
from embedctl_workers.machine.devices import cores_of, format_cpus
from embedctl_workers.models.cache import private_folder

#: Texts whose vectors are compared, and with which systems choose their settings.
_CHECKED = 64
#: For a cell, all rounds together; the floor gets less, because it has no latencies.
_EFFORT, _FLOOR_EFFORT = Effort(10.0, 5, 200), Effort(1.5, 3, 200)
_QUICK_EFFORT = Effort(0.6, 2, 40)
_ROUNDS, _QUICK_ROUNDS = 3, 2


def _axis(name: str, what: str, default: Sequence[int]) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}",
        f"{name}_axis",
        type=click.IntRange(min=1),
        multiple=True,
        default=tuple(default),
        show_default=True,
        help=f"{what}. Can be repeated.",
    )


@click.command("grid")
@common
@_axis("cores", "Cores that each system runs on", (1, 2, 4, 8))
@_axis("copies", "Copies of the model, each in a process with its share of the cores", (1,))
@_axis("length", "Tokens of each text", tuple(INFINITY))
@_axis("batch", "Texts of a request", (1, 2, 4, 8, 16, 32))
def command(
    asked: Asked,
    cores_axis: tuple[int, ...],
    copies_axis: tuple[int, ...],
    length_axis: tuple[int, ...],
    batch_axis: tuple[int, ...],
) -> None:
    """Cores × copies × lengths × batches: as Hugging Face measured Infinity, and AWS Neuron.

    Each cell takes 10 seconds or 200 requests, one after the other; by default there are 192. Plain transformers and
    the other systems that are installed take turns with embedctl's engine. Cells that need more cores than this machine
    has are left out. For the shapes of the published models, use --model distilbert-shape and --model bge-base-shape.
    """
    cores, copies, lengths, batches = (
        tuple(dict.fromkeys(axis)) for axis in (cores_axis, copies_axis, length_axis, batch_axis)
    )
    scope = GridScope(
        cores,
        copies,
        lengths,
        batches,
        effort=_QUICK_EFFORT if asked.quick else _EFFORT,
        floor=_QUICK_EFFORT if asked.quick else _FLOOR_EFFORT,
        rounds=_QUICK_ROUNDS if asked.quick else _ROUNDS,
    )
    if asked.quick:
        scope = scope.quick()
    place = private_folder(peers_folder(asked.settings))
    peers, uninstalled = choose_peers(asked.peers, place)
    systems = [*(engine_of(name, asked.settings) for name in asked.classes), TRANSFORMERS, *peers]
    seats = len(scope.cores) * len(scope.copies)
    plan = len(asked.models) * seats * (2 * len(systems) + 1 + scope.cells * scope.rounds)
    session = asked.session("grid", plan, peers=requirements_digest())
    found: list[GridResult] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            model = measured_model(name, asked.settings, place)
            workload = make_workload("W1", _CHECKED, model, place)
            found.append(GridResult(name, describe(name), scope))
            cpus = sorted(asked.cpus)
            reference = reference_of(model, workload, cpus, place)
            ground = Ground(model.name, model, workload, reference, cpus, place, session, asked.quick)
            measure(ground, systems, found[-1], asked)
    conclude(report(found, uninstalled, asked), asked, session)


def measure(ground: Ground, systems: Sequence[System], result: GridResult, asked: Asked) -> None:
    """Fill the result, cell by cell."""
    scope, have = result.scope, cores_of(asked.cpus)
    steps = 2 * len(systems) + 1 + scope.cells * scope.rounds
    exact = ExactTexts(ground.model)
    for cores, copies in product(scope.cores, scope.copies):
        why = ""
        if cores > len(have):
            why = f"--cpus {format_cpus(asked.cpus)} has {len(have)}"
        elif copies > cores or (copies > 1 and asked.device != "cpu"):
            why = "each copy needs a core, and a device, of its own"
        if why:
            result.skipped.append((f"{cores} cores, {copies} copies", why, scope.cells))
            ground.session.more(-steps)
            continue
        cpus = sorted(frozenset[int]().union(*have[:cores]))
        key = f"{ground.key}/{cores} cores/{copies} copies"
        _measure_on(replace(ground, cpus=cpus, key=key), cores, copies, systems, exact, result)


def _measure_on(
    ground: Ground, cores: int, copies: int, systems: Sequence[System], exact: ExactTexts, result: GridResult
) -> None:
    """The cells on some cores: every system is loaded once for all of them."""
    scope, session = result.scope, ground.session
    with ExitStack() as stack:
        contenders = [
            Contender(_in_copies(system, copies), ground, lambda process: process.encode())
            for system in (FLOOR, *systems)
        ]
        result.runs[cores, copies] = [contender.runs for contender in contenders]
        able = choose_settings(contenders, stack, session)
        for length, batch in product(scope.lengths, scope.batches):
            place = GridPlace(cores, copies, length, batch)
            if length > (most := ground.model.max_tokens):
                if batch == scope.batches[0]:
                    result.skipped.append((f"{length} tokens", f"the model takes {most}", len(scope.batches)))
                session.more(-scope.rounds)
                continue
            requests = exact.requests(length, batch, max(4, 64 // batch))
            file = kept(requests, ground.place, f"grid-{length}-{batch}")

            def run(contender: Contender) -> Run:
                is_floor = contender.runs.name == FLOOR.name
                effort = (scope.floor if is_floor else scope.effort).share(scope.rounds)
                figures = {} if is_floor else contender.accuracy()
                seconds, latencies = contender.process().sample(file, effort)  # noqa: B023  (it runs at once)
                return Run(seconds, length * batch, **figures, latencies=latencies)  # noqa: B023  (as above)

            key = f"{ground.key}/{length} tokens/batch {batch}"
            take_turns(able, run, place.load, rounds=scope.rounds, repeats=0, session=session, key=key)


def _in_copies(system: System, copies: int) -> System:
    """The system in this number of processes; it chooses among the options of its settings with one process."""
    single = [each for each in system.settings if each.processes == 1]
    return replace(system, settings=tuple(replace(each, processes=copies) for each in single))
