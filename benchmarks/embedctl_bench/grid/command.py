"""`embedctl bench grid`: cores × lengths × batches, end to end and step by step, as Hugging Face measured Infinity."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import click

from embedctl_bench.asking import common, conclude
from embedctl_bench.grid.report import report
from embedctl_bench.grid.results import PUBLISHED, GridPlace, GridResult, GridScope
from embedctl_bench.measuring.accuracy import measure_accuracy
from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.cells import Bench, Case, seats_on
from embedctl_bench.measuring.models import model_files, peers_folder
from embedctl_bench.measuring.sampled import Effort, SampledProcesses, Seat
from embedctl_bench.measuring.sampling import REPEATS
from embedctl_bench.measuring.shapes import describe
from embedctl_bench.measuring.texts import ExactTexts
from embedctl_bench.peers.environments import requirements_digest
from embedctl_bench.peers.registry import FLOOR, TRANSFORMERS, System, backend_of, choose_peers
from embedctl_config.errors import SettingsError
from embedctl_workers.machine.devices import cores_of, format_cpus
from embedctl_workers.models.cache import private_folder
from embedctl_workers.models.files import ModelFiles

FULL = GridScope(
    cores=(1, 2, 4, 8),
    lengths=tuple(PUBLISHED),
    batches=(1, 2, 4, 8, 16, 32),
    effort=Effort(10.0, 5, 200),
    floor=Effort(1.5, 3, 200),
    rounds=3,
    repeats=REPEATS,
)
QUICK = GridScope(
    cores=(1, 2),
    lengths=(8, 64, 256),
    batches=(1, 8),
    effort=Effort(0.6, 2, 40),
    floor=Effort(0.2, 2, 20),
    rounds=2,
    repeats=0,
)


@click.command("grid")
@common(peers=True)
def command(asked: Asked) -> None:
    """Cores × lengths × batches: 192 cells, as Hugging Face measured Infinity.

    1, 2, 4 and 8 cores, texts of 8 to 512 tokens, requests of 1 to 32 texts; each cell takes 10 seconds or 200
    requests. Plain transformers and the other systems that are installed take turns with embedctl. Cells that need more
    cores than this machine has are left out. For the shape of the published model, use --model distilbert-shape.
    """
    scope = QUICK if asked.quick else FULL
    place = private_folder(peers_folder(asked.settings))
    peers, uninstalled = choose_peers(asked.peers, place)
    systems = [
        *(backend_of(name) for name in asked.classes),
        TRANSFORMERS,
        *peers,
        FLOOR,
    ]
    results: list[GridResult] = []
    plan = len(asked.models) * scope.steps(len(systems), len(cores_of(asked.cpus)))
    session = asked.session("grid", plan, peers=requirements_digest())
    with session, SampledProcesses(place) as processes:
        bench = Bench(asked, session, processes, scope.rounds, scope.repeats)
        try:
            for name in asked.models:
                results.append(GridResult(model_files(name, asked.settings), describe(name)))
                measure(bench, results[-1], systems, scope)
        except KeyboardInterrupt:
            session.stopped = True
    conclude(report(results, bench, scope, uninstalled), asked, session)


def measure(bench: Bench, result: GridResult, systems: Sequence[System], scope: GridScope) -> None:
    """Fill the result, cell by cell."""
    model = result.model
    exact = ExactTexts(model)
    longest = {}
    for system in systems:
        if facts := bench.facts(system, model):
            longest[system] = facts.max_tokens
            if system != FLOOR:
                result.systems[system] = facts.engine
    if TRANSFORMERS in longest:
        result.accuracy = measure_accuracy(bench, model, result.systems)
    most = min((longest[system] for system in longest if system != FLOOR), default=0)
    for cores in scope.cores:
        seats = seats_of(bench, list(longest), cores, model, scope)
        if seats:
            bench.processes.keep({seat for each in seats.values() for seat in each}, model)
        for length, batch in product(scope.lengths, scope.batches) if seats else ():
            if length > most:
                _skip(bench, scope, f"{model.name}: {length} tokens", f"it takes {most} at most", len(seats))
                continue
            requests = exact.requests(length, batch, max(4, 64 // batch))
            cases = {
                system.name: Case(system, seats[system], requests, scope.floor if system == FLOOR else scope.effort)
                for system in seats
            }
            found = bench.measure(f"{cores} cores/{length} tokens/batch {batch}", model, cases)
            result.cells[GridPlace(cores, length, batch)] = found


def seats_of(
    bench: Bench, systems: Sequence[System], cores: int, model: ModelFiles, scope: GridScope
) -> dict[System, list[Seat]]:
    """Each system's seat on the first `cores` cores; none, with a note, if there are fewer."""
    have = cores_of(bench.asked.cpus)
    if cores > len(have):
        why = f"--cpus {format_cpus(bench.asked.cpus)} has {len(have)}"
        bench.skip(f"{model.name}: {cores} cores", why, scope.cells)
        return {}
    cpus = frozenset[int]().union(*have[:cores])
    found = {}
    for system in systems:
        try:
            found[system] = [Seat(cpus, seat.accelerator) for seat in seats_on(system, bench.asked, 1)]
        except SettingsError as error:
            _skip(bench, scope, f"{model.name}: {system.name}", str(error), 1, scope.cells)
    return found


def _skip(bench: Bench, scope: GridScope, what: str, why: str, systems: int, cells: int = 1) -> None:
    bench.skip(what, why, cells)
    bench.session.more(-cells * systems * scope.rounds)
