"""`embedctl bench grid`: cores × lengths × batches, end to end and step by step, as Hugging Face measured Infinity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import click

from embedctl_bench.asking import Asked, common, conclude
from embedctl_bench.measuring.accuracy import VANILLA, measure_accuracy
from embedctl_bench.measuring.cells import Bench, Case, Found, model_files, peers_folder, seats_on
from embedctl_bench.measuring.engines import CLASS, FLOOR, PEER, Effort, Engines, Seat, System
from embedctl_bench.measuring.sampling import REPEATS
from embedctl_bench.measuring.shapes import describe
from embedctl_bench.measuring.texts import ExactTexts
from embedctl_bench.request.systems import choose_peers, requirements
from embedctl_config.errors import SettingsError
from embedctl_workers.machine.devices import cores_of, format_cpus
from embedctl_workers.models.cache import private_folder
from embedctl_workers.models.files import ModelFiles

MATRIX_PRODUCTS = System(FLOOR)
#: Published for DistilBERT at 2 cores and batch 1: length → requests/s of HF Infinity, and of transformers.
PUBLISHED = {
    8: (248, 49),
    16: (212, 50),
    32: (150, 40),
    64: (97, 28),
    128: (55, 18),
    256: (27, 9),
    384: (17, 5),
    512: (12, 4),
}
PUBLISHED_CORES = 2


def times_published(length: int) -> float:
    """How many times transformers' rate, by the published table."""
    infinity, transformers = PUBLISHED[length]
    return infinity / transformers


@dataclass(frozen=True, slots=True)
class Scope:
    """The cells, and how much is measured of each, all rounds together; of the floor less, as it has no latencies."""

    cores: Sequence[int]
    lengths: Sequence[int]
    batches: Sequence[int]
    effort: Effort
    floor: Effort
    rounds: int
    repeats: int

    @property
    def cells(self) -> int:
        """Of one number of cores."""
        return len(self.lengths) * len(self.batches)

    def steps(self, systems: int, cores: int) -> int:
        """Of a session, for one model on so many cores; the reference and the floor have no accuracy."""
        cells = self.cells * sum(each <= cores for each in self.cores)
        return systems * (2 + cells * self.rounds) - 2


FULL = Scope(
    cores=(1, 2, 4, 8),
    lengths=tuple(PUBLISHED),
    batches=(1, 2, 4, 8, 16, 32),
    effort=Effort(10.0, 5, 200),
    floor=Effort(1.5, 3, 200),
    rounds=3,
    repeats=REPEATS,
)
QUICK = Scope(
    cores=(1, 2),
    lengths=(8, 64, 256),
    batches=(1, 8),
    effort=Effort(0.6, 2, 40),
    floor=Effort(0.2, 2, 20),
    rounds=2,
    repeats=0,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the grid; lengths in tokens."""

    cores: int
    length: int
    batch: int


@dataclass(slots=True)
class Result:
    """All that was measured of one model.

    Attributes:
        systems: that could be loaded, with their engines; ours first, and without the floor.
    """

    model: ModelFiles
    shown: str
    systems: dict[System, str] = field(default_factory=dict)
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cells: dict[Place, Mapping[str, Found]] = field(default_factory=dict)

    @property
    def ours(self) -> list[System]:
        """Classes of ours that were measured."""
        return [system for system in self.systems if system.ours]

    def rate(self, place: Place, system: System) -> float | None:
        """Texts/s."""
        found = self.cells.get(place, {}).get(system.name)
        return found.rate if found else None

    def times(self, place: Place, system: System, than: System = VANILLA) -> float | None:
        """How many times the rate of another one, in the same cell."""
        found = self.cells.get(place, {})
        ours, other = found.get(system.name), found.get(than.name)
        return ours.times(other) if ours and other else None

    def at_cores(self) -> int:
        """The core count that the publication's table is of; the largest that was measured where it was not."""
        measured = {place.cores for place in self.cells} or {PUBLISHED_CORES}
        return PUBLISHED_CORES if PUBLISHED_CORES in measured else max(measured)


@click.command("grid")
@common(peers=True)
def command(asked: Asked) -> None:
    """Cores × lengths × batches: 192 cells, as Hugging Face measured Infinity.

    1, 2, 4 and 8 cores, texts of 8 to 512 tokens, requests of 1 to 32 texts, each as long as 10 seconds or 200 requests
    take; beside plain transformers, and other systems where they are installed. What this machine has no cores for is
    left out. That model's shape is distilbert-shape.
    """
    from embedctl_bench.grid.report import report

    scope = QUICK if asked.quick else FULL
    place = private_folder(peers_folder(asked.settings))
    peers, uninstalled = choose_peers(asked.peers, place)
    systems = [
        *(System(CLASS, name) for name in asked.classes),
        VANILLA,
        *(System(PEER, peer=name) for name in peers),
        MATRIX_PRODUCTS,
    ]
    results: list[Result] = []
    plan = len(asked.models) * scope.steps(len(systems), len(cores_of(asked.cpus)))
    session = asked.session("grid", plan, peers=requirements())
    with session, Engines(place) as engines:
        bench = Bench(asked, session, engines, scope.rounds, scope.repeats)
        try:
            for name in asked.models:
                results.append(Result(model_files(name, asked.settings), describe(name)))
                measure(bench, results[-1], systems, scope)
        except KeyboardInterrupt:
            session.stopped = True
    conclude(report(results, bench, scope, uninstalled), asked, session)


def measure(bench: Bench, result: Result, systems: Sequence[System], scope: Scope) -> None:
    """Fill the result, cell by cell."""
    model = result.model
    exact = ExactTexts(model)
    longest = {}
    for system in systems:
        if facts := bench.facts(system, model):
            longest[system] = facts.max_tokens
            if system != MATRIX_PRODUCTS:
                result.systems[system] = facts.engine
    if VANILLA in longest:
        result.accuracy = measure_accuracy(bench, model, result.systems)
    most = min((longest[system] for system in longest if system != MATRIX_PRODUCTS), default=0)
    for cores in scope.cores:
        seats = seats_of(bench, list(longest), cores, model, scope)
        if seats:
            bench.engines.keep({seat for each in seats.values() for seat in each}, model)
        for length, batch in product(scope.lengths, scope.batches) if seats else ():
            if length > most:
                _skip(bench, scope, f"{model.name}: {length} tokens", f"it takes {most} at most", len(seats))
                continue
            requests = exact.requests(length, batch, max(4, 64 // batch))
            cases = {
                system.name: Case(
                    system, seats[system], requests, scope.floor if system == MATRIX_PRODUCTS else scope.effort
                )
                for system in seats
            }
            found = bench.measure(f"{cores} cores/{length} tokens/batch {batch}", model, cases)
            result.cells[Place(cores, length, batch)] = found


def seats_of(
    bench: Bench, systems: Sequence[System], cores: int, model: ModelFiles, scope: Scope
) -> dict[System, list[Seat]]:
    """Each system alone on the first so many cores; none, noted, where there are fewer."""
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


def _skip(bench: Bench, scope: Scope, what: str, why: str, systems: int, cells: int = 1) -> None:
    bench.skip(what, why, cells)
    bench.session.more(-cells * systems * scope.rounds)
