"""`embedctl bench engines`: CPU embedding engines side by side: ours, others, and matrix products alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

from embedctl_bench.asking import common, conclude
from embedctl_bench.engines.report import report
from embedctl_bench.engines.results import EnginesResult
from embedctl_bench.engines.workloads import describe_workload, make_workload
from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.comparison import Run, SystemRuns
from embedctl_bench.measuring.contenders import Contender, Ground, choose_settings, take_turns
from embedctl_bench.measuring.distance import distance
from embedctl_bench.measuring.models import copy_name, model_files, peers_folder
from embedctl_bench.measuring.session import Session
from embedctl_bench.measuring.shapes import describe
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.environments import requirements_digest
from embedctl_bench.peers.models import Model, uncut
from embedctl_bench.peers.registry import (
    AT_ITS_DEFAULT,
    FLOORS,
    System,
    baselines_for,
    choose_peers,
    engine_of,
    product_of,
)
from embedctl_bench.peers.tuned import EncodedWorkload, reference_of
from embedctl_workers.models.cache import private_folder

#: Texts of each workload for all-MiniLM-L6-v2, and with --quick.
COUNTS = {"W1": (2048, 256), "W2": (192, 24)}
ROUNDS, QUICK_ROUNDS = 5, 2
_FLOORS = {floor.name for floor in FLOORS.values()}
#: Numbers of workers of our product: no more than the processes that the other systems choose from.
WORKERS = (1, 2)
#: Operations of all-MiniLM-L6-v2 for one token. A larger model gets fewer texts in proportion, so that work is equal.
_MINILM_FLOPS = 2.0 * 6 * 384 * (4 * 384 + 2 * 1536)


@click.command("engines")
@common(peers=True)
@click.option(
    "--workload",
    "workloads",
    type=click.Choice(list(COUNTS)),
    multiple=True,
    default=tuple(COUNTS),
    show_default=True,
    help="The texts: W1 has mixed lengths of up to 256 tokens, W2 has long texts of 443 to 449. Can be repeated.",
)
def command(asked: Asked, workloads: tuple[str, ...]) -> None:
    """CPU engines side by side: embedctl and other systems.

    Compares embedctl's engines called directly, embedctl end to end, other systems, and matrix products alone. Each
    system uses the setting that was fastest for it on a sample. All encode the same texts on the same CPUs, in turn, in
    five rounds. Ratios are relative to sentence-transformers on torch in fp32.
    """
    place = private_folder(peers_folder(asked.settings))
    peers, uninstalled = choose_peers(asked.peers, place)
    rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    systems = systems_for(asked, peers)
    plan = len(asked.models) * len(workloads) * (len(floors_for(systems)) + len(systems)) * (1 + rounds)
    session = asked.session("engines", plan, peers=requirements_digest())
    found: list[EnginesResult] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            files = model_files(name, asked.settings)
            model = uncut(copy_name(files), files.folder, place)
            for workload_name in dict.fromkeys(workloads):
                count = count_of(workload_name, model, quick=asked.quick)
                workload = make_workload(workload_name, count, model, place)
                found.append(EnginesResult(name, describe(name), model, workload, rounds, uninstalled))
                measure(ground(found[-1], asked, place, session), systems, found[-1])
    conclude(report(found, asked), asked, session)


def systems_for(asked: Asked, peers: Sequence[System]) -> list[System]:
    """The systems to rank: sentence-transformers of our own environment, where the peers lack it; peers; ours.

    Raises:
        SettingsError: there is no such class.
    """
    engines = [engine_of(name, asked.settings) for name in asked.classes]
    products = [product_of(name, asked.settings, len(asked.cpus), WORKERS) for name in asked.classes]
    return [*baselines_for(products, peers), *peers, *engines, *products]


def floors_for(systems: Sequence[System]) -> list[System]:
    """The floors of the precisions that systems promise; one at its default may promise 16 bits."""
    wanted = {"fp16" if system.precision == AT_ITS_DEFAULT else system.precision for system in systems}
    return [floor for precision, floor in FLOORS.items() if precision in wanted]


def count_of(workload: str, model: Model, *, quick: bool) -> int:
    """The number of texts of a workload for a model, one at least."""
    return max(1, round(COUNTS[workload][quick] * min(1.0, _MINILM_FLOPS / model.flops_per_token)))


def ground(result: EnginesResult, asked: Asked, place: Path, session: Session) -> Ground:
    """What all systems have in common on one model and workload; computes the reference unless it is kept.

    Raises:
        Unavailable: the reference can't be computed.
    """
    model, workload, cpus = result.model, result.workload, sorted(asked.cpus)
    session.say(f"{result.name}, {describe_workload(workload)}")
    reference = reference_of(model, workload, cpus, place)
    key = f"{model.name}/{workload.name} {workload.digest}"
    return Ground(key, model, workload, reference, cpus, place, session, asked.quick)


def measure(ground: Ground, systems: Sequence[System], result: EnginesResult) -> None:
    """Let every system choose its setting, then measure the systems and the floors round by round."""
    floors = floors_for(systems)
    result.systems += [SystemRuns[Run].of(system) for system in systems]
    result.floors = [SystemRuns[Run].of(floor) for floor in floors]
    pairs = [*zip(floors, result.floors, strict=True), *zip(systems, result.systems, strict=True)]
    with ExitStack() as stack:
        contenders = [Contender(system, runs, ground, lambda process: process.encode()) for system, runs in pairs]
        take_turns(
            choose_settings(contenders, stack, ground.session, result.rounds),
            lambda contender: run_of(contender.process().encode(), contender.runs, ground),
            Run,
            rounds=result.rounds,
            repeats=0,
            session=ground.session,
            key=ground.key,
        )


def run_of(done: EncodedWorkload, runs: SystemRuns[Run], ground: Ground) -> dict[str, Any]:
    """A run as JSON, its vectors compared with the reference; a floor makes none.

    Raises:
        Unavailable: the vectors are not those of the texts.
    """
    if runs.name in _FLOORS:
        return Run(done.seconds, done.tokens, math.nan, math.nan, math.nan).to_json()
    try:
        figures = distance(done.vectors, ground.reference)
    except ValueError as error:
        raise Unavailable(str(error)) from None
    return Run(done.seconds, done.tokens, **figures).to_json()
