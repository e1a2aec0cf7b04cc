"""`embedctl bench matrix`: batch × sequence × processes × requests at once, with cost, as AWS measures Neuron."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import click

from embedctl_bench.asking import Asked, common, conclude
from embedctl_bench.measuring.accuracy import accuracy_table, measure_accuracy
from embedctl_bench.measuring.cells import (
    EFFORT,
    LATENCY,
    RATE,
    Bench,
    Case,
    Found,
    listed,
    model_files,
    peers_folder,
    seats_on,
    slug,
)
from embedctl_bench.measuring.engines import CLASS, Effort, Engines, System
from embedctl_bench.measuring.sampling import REPEATS, cost_per_million
from embedctl_bench.measuring.shapes import describe
from embedctl_bench.measuring.texts import ExactTexts
from embedctl_bench.report.report import Claim, Column, Plot, Report, Series, Table
from embedctl_config.errors import SettingsError
from embedctl_workers.models.files import ModelFiles

#: An hour of an inf2.xlarge, as the publication reckons ($).
PRICE = 0.758
#: Published for bge-base on an inf2.xlarge at that price: inferences/s and $ for a million.
PUBLISHED = ((966.409, 0.218), (1001.071, 0.211))
#: How far a cost that is reckoned from its rate may be from the published one.
_COST_ERROR = 0.001

#: Of one cell, all rounds together.
_EFFORT = Effort(seconds=15.0, least=6, most=600)
_QUICK_EFFORT = Effort(seconds=1.0, least=2, most=40)


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells, and how much is measured of each."""

    batches: Sequence[int] = (1, 16, 32)
    sequences: Sequence[int] = (256, 512)
    models: Sequence[int] = (1, 2)
    workers: Sequence[int] = (1, 2)
    effort: Effort = _EFFORT
    rounds: int = 3
    repeats: int = REPEATS

    def steps(self, systems: int) -> int:
        """Of a session, for one model."""
        cells = len(self.batches) * len(self.sequences) * len(self.models) * len(self.workers)
        return (2 + cells * self.rounds) * systems


FULL = Grid()
QUICK = Grid((1, 16), (256,), (1, 2), (1, 2), _QUICK_EFFORT, rounds=2, repeats=0)


@dataclass(frozen=True, slots=True)
class Cell:
    """One place in the matrix: `models` processes with a copy of the model each, `workers` requests at once in each."""

    system: System
    models: int
    workers: int
    sequence: int
    found: Found


@dataclass(slots=True)
class Result:
    """All that was measured of one model."""

    model: ModelFiles
    shown: str
    cells: list[Cell] = field(default_factory=list)
    engines: dict[System, str] = field(default_factory=dict)
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@click.command("matrix")
@common(price=PRICE)
def command(asked: Asked) -> None:
    """Batch × sequence × copies of the model × requests at once, with latency and cost.

    As AWS measures bge-base on Inferentia: batches of 1, 16 and 32, sequences of 256 and 512 tokens, one and two
    copies of the model, each on its share of the cores, and one and two requests at once for each. That model's shape
    is bge-base-shape.
    """
    grid = QUICK if asked.quick else FULL
    systems = [System(CLASS, name) for name in asked.classes]
    results: list[Result] = []
    plan = len(asked.models) * grid.steps(len(systems))
    with asked.session("matrix", plan) as session, Engines(peers_folder(asked.settings)) as engines:
        bench = Bench(asked, session, engines, grid.rounds, grid.repeats)
        try:
            for name in asked.models:
                results.append(Result(model_files(name, asked.settings), describe(name)))
                measure(bench, results[-1], systems, grid)
        except KeyboardInterrupt:
            session.stopped = True
    conclude(report(results, bench, grid), asked, session)


def measure(bench: Bench, result: Result, systems: Sequence[System], grid: Grid) -> None:
    """Fill the result, cell by cell."""
    model = result.model
    exact = ExactTexts(model)
    longest: dict[System, int] = {}
    for system in systems:
        if facts := bench.facts(system, model):
            result.engines[system] = facts.engine
            longest[system] = facts.max_tokens
    result.accuracy = measure_accuracy(bench, model, result.engines)
    for copies in grid.models:
        try:
            seats = {system: seats_on(system, bench.asked, copies) for system in longest}
        except SettingsError as error:
            cells = len(grid.batches) * len(grid.sequences) * len(grid.workers) * len(longest)
            _skip(bench, grid, f"{model.name}: {copies} models", str(error), cells)
            continue
        bench.engines.keep({seat for each in seats.values() for seat in each}, model)
        for sequence, batch, workers in product(grid.sequences, grid.batches, grid.workers):
            able = [system for system in longest if longest[system] >= sequence]
            for system in longest.keys() - set(able):
                why = f"the model takes {longest[system]} tokens at most"
                _skip(bench, grid, f"{model.name}, {system.name}: sequence {sequence}", why)
            requests = exact.requests(sequence, batch, max(4, 64 // batch))
            effort = replace(grid.effort, workers=workers)
            cases = {system.name: Case(system, seats[system], requests, effort) for system in able}
            key = f"{copies} models/{workers} workers/sequence {sequence}/batch {batch}"
            found = bench.measure(key, model, cases)
            result.cells += [Cell(cases[name].system, copies, workers, sequence, each) for name, each in found.items()]


def _skip(bench: Bench, grid: Grid, what: str, why: str, cells: int = 1) -> None:
    bench.skip(what, why, cells)
    bench.session.more(-cells * grid.rounds)


def report(results: Sequence[Result], bench: Bench, grid: Grid) -> Report:
    """What was measured, beside what was published."""
    asked = bench.asked
    tables = [_published()]
    plots: list[Plot] = []
    for result in results:
        tables += [_cells(result, asked.price), accuracy_table(result.model, result.accuracy, result.engines)]
        plots += _plots(result, asked.price)
    if bench.skipped:
        tables.append(bench.skipped_table("left-out"))
    return Report(
        name="matrix",
        title="Batch × sequence × models × workers: latency, throughput, cost",
        command=asked.command,
        workload=_workload(results, grid),
        machine=asked.machine(),
        tables=tables,
        plots=plots,
        claims=_claims(),
        notes=[bench.noise.note(grid.rounds, grid.repeats), *_notes(asked.price)],
    )


def _workload(results: Sequence[Result], grid: Grid) -> str:
    effort = grid.effort
    return (
        f"Models: {'; '.join(each.shown for each in results)}. Requests of {listed(grid.batches)} texts, each of "
        f"exactly {listed(grid.sequences)} tokens, special ones included: words that are one token each, drawn with a "
        f"fixed seed. {listed(grid.models)} copies of the model, each in a process of its own pinned to an equal "
        f"share of the cores, with {listed(grid.workers)} requests at once in each. A cell is measured for "
        f"{effort.seconds:g} s or {effort.most} requests, whichever is less, and {effort.least} requests at least, in "
        f"{grid.rounds} rounds together. Latency is end to end, from texts to vectors of unit length, tokenising and "
        "waiting for the other request included; p99 is given from 100 requests on."
    )


def _notes(price: float | None) -> Iterator[str]:
    yield (
        "The publication is of an accelerator, and these classes are of CPUs unless they say otherwise: compare costs, "
        "at the price of the machine, rather than rates. Here tokenising is within the time; whether it is there is "
        "not stated."
    )
    yield "All texts of a request are equally long, so that no engine pads: see `embedctl bench study` for padding."
    if price == PRICE:
        yield (
            f"Cost is reckoned with the publication's price of an hour, ${PRICE}, which is not this machine's: give "
            "`--price` for yours."
        )


def _published() -> Table:
    columns = (
        Column("what", "published"),
        Column("per_s", "inferences/s", digits=3),
        Column("cost", "cost of 1M", "$", 3),
        Column("reckoned", "reckoned here", "$", 3),
    )
    rows = [
        {
            "what": "bge-base, Neuron, inf2.xlarge",
            "per_s": rate,
            "cost": cost,
            "reckoned": cost_per_million(rate, PRICE),
            "_published": True,
        }
        for rate, cost in PUBLISHED
    ]
    note = f"Cost of a million = 10⁶ / rate × ${PRICE} / 3600. Which cells of the matrix these two are is not stated."
    return Table("published", "Published for bge-base on an inf2.xlarge", columns, rows, note)


def _claims() -> list[Claim]:
    return [
        Claim(
            f"cost of a million at {rate} inferences/s and ${PRICE} an hour",
            f"${cost}",
            f"${cost_per_million(rate, PRICE):.4f}",
            met=abs(cost_per_million(rate, PRICE) - cost) <= _COST_ERROR,
        )
        for rate, cost in PUBLISHED
    ]


def _cells(result: Result, price: float | None) -> Table:
    columns = (
        Column("system", "system"),
        Column("models", "models"),
        Column("workers", "workers per model"),
        Column("sequence", "sequence"),
        Column("batch", "batch"),
        *RATE,
        *(column for column in LATENCY if column.key in ("p50_ms", "p99_ms")),
        *([Column("cost_per_million", "cost of 1M texts", "$", 3)] if price is not None else []),
        *EFFORT,
    )
    rows = [
        {
            "system": cell.system.name,
            "models": cell.models,
            "workers": cell.workers,
            "sequence": cell.sequence,
            **cell.found.row(price),
        }
        for cell in sorted(result.cells, key=_order)
    ]
    note = "; ".join(f"{system.name}: {engine}" for system, engine in result.engines.items()) + "."
    if price is not None:
        note += f" Cost at ${price:g} an hour."
    return Table(f"{slug(result.model.name)}-cells", f"{result.model.name}: the matrix", columns, rows, note)


def _order(cell: Cell) -> tuple[object, ...]:
    return cell.system.name, cell.sequence, cell.found.batch, cell.models, cell.workers


def _plots(result: Result, price: float | None) -> list[Plot]:
    name, model = slug(result.model.name), result.model.name
    lines: dict[tuple[str, int], dict[int, Found]] = {}
    for cell in result.cells:
        best = lines.setdefault((cell.system.name, cell.sequence), {})
        if cell.found.batch not in best or best[cell.found.batch].rate < cell.found.rate:
            best[cell.found.batch] = cell.found

    def series(y: str) -> list[Series]:
        return [
            Series(f"{system}, {sequence} tokens", sorted(best), [_float(best[at], y, price) for at in sorted(best)])
            for (system, sequence), best in lines.items()
        ]

    plots = [
        Plot(
            f"{name}-throughput",
            f"{model}: throughput by batch, the best of models × workers",
            "batch",
            "texts/s",
            series("texts_per_s"),
            log_y=True,
        ),
        Plot(
            f"{name}-latency",
            f"{model}: p50 of the same cells",
            "batch",
            "ms",
            series("p50_ms"),
            log_y=True,
        ),
    ]
    if price is not None:
        title = f"{model}: cost of a million texts at ${price:g} an hour, the same cells"
        plots.append(Plot(f"{name}-cost", title, "batch", "$", series("cost_per_million"), log_y=True))
    return [plot for plot in plots if plot.series]


def _float(found: Found, key: str, price: float | None) -> float:
    value = found.row(price)[key]
    assert isinstance(value, float)
    return value
