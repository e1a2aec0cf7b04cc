"""The report of `embedctl bench grid`, beside what Hugging Face published of Infinity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median

from embedctl_bench.asking import Asked
from embedctl_bench.measuring.comparison import (
    ACCURACY,
    COMPUTES,
    COST,
    FLOOR_SHARE,
    LATENCY,
    RATES,
    SYSTEM,
    SYSTEMS,
    Comparison,
    SystemRuns,
)
from embedctl_bench.measuring.sampling import RATIOS
from embedctl_bench.peers.models import slug
from embedctl_bench.peers.registry import FLOOR, TRANSFORMERS
from embedctl_bench.peers.tuned import Effort
from embedctl_bench.report.report import Claim, Column, Report, Table

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
_TIMES = Column("times", "× transformers", digits=2)


@dataclass(frozen=True, slots=True)
class GridScope:
    """The cells, and the effort for each, all rounds together."""

    cores: Sequence[int]
    copies: Sequence[int]
    lengths: Sequence[int]
    batches: Sequence[int]
    effort: Effort
    floor: Effort
    rounds: int

    @property
    def cells(self) -> int:
        """The number of cells on the same cores."""
        return len(self.lengths) * len(self.batches)

    def quick(self) -> GridScope:
        """A few of the cells: on each axis those of a small grid, or else the first."""

        def few(axis: Sequence[int], some: Sequence[int]) -> Sequence[int]:
            return [each for each in axis if each in some] or axis[:1]

        return replace(
            self,
            cores=few(self.cores, (1, 2)),
            copies=self.copies[:1],
            lengths=few(self.lengths, (8, 64, 256)),
            batches=few(self.batches, (1, 8)),
        )


@dataclass(frozen=True, slots=True)
class GridPlace:
    """A place in the grid; `length` in tokens, `batch` in texts."""

    cores: int
    copies: int
    length: int
    batch: int

    @property
    def load(self) -> str:
        """The load, which is the same on all cores."""
        return f"{self.length} tokens, batch {self.batch}"


@dataclass(slots=True)
class GridResult:
    """All measurements of one model.

    Attributes:
        name: the model as the command line has it.
        shown: the model in words.
        runs: of the floor and the systems, by cores and copies.
        skipped: what could not be measured, why, and how many cells that is.
    """

    name: str
    shown: str
    scope: GridScope
    runs: dict[tuple[int, int], list[SystemRuns]] = field(default_factory=dict)
    skipped: list[tuple[str, str, int]] = field(default_factory=list)

    def on(self, place: GridPlace) -> Comparison:
        """What was measured so far in a cell."""
        runs = [each.on(place.load) for each in self.runs.get((place.cores, place.copies), ())]
        floors, systems = (
            [each for each in runs if (each.name == FLOOR.name) is is_floor] for is_floor in (True, False)
        )
        where = f"{self.name}, {_words(place.cores, 'core')}, {_words(place.copies, 'copy')}, {place.load}"
        return Comparison(where, place.batch, 1, systems, floors)

    def places(self) -> Iterator[tuple[GridPlace, Comparison]]:
        """The cells with measurements."""
        for cores, copies in self.runs:
            for length, batch in product(self.scope.lengths, self.scope.batches):
                place = GridPlace(cores, copies, length, batch)
                if (comparison := self.on(place)).measured:
                    yield place, comparison

    def on_first(self) -> Comparison:
        """The first cell with measurements, or else the first of all."""
        first = GridPlace(*next(iter(self.runs), (1, 1)), self.scope.lengths[0], self.scope.batches[0])
        return next((comparison for _, comparison in self.places()), self.on(first))

    def shown_on(self) -> tuple[int, int]:
        """The cores and copies of the published table, or else the largest that were measured."""
        published = (INFINITY_CORES, 1)
        return published if published in self.runs or not self.runs else max(self.runs)

    def leads(self, system: str) -> dict[int, float]:
        """By length, the rate with one text a request as a multiple of transformers'."""
        found = {}
        for length in self.scope.lengths:
            comparison = self.on(GridPlace(*self.shown_on(), length, 1))
            ours, base = comparison.find(system), comparison.find(TRANSFORMERS.name)
            if ours and base and ours.ratios(base):
                found[length] = ours.times(base)
        return found

    def ours(self) -> list[SystemRuns]:
        """Our engines that were measured there."""
        return [each for each in self.runs.get(self.shown_on(), ()) if each.ours and each.loads]


def report(results: Sequence[GridResult], uninstalled: Sequence[str], asked: Asked) -> Report:
    """The whole report."""
    return Report(
        name="grid",
        title="Cores × copies × lengths × batches, end to end",
        command=asked.command,
        workload=" ".join(_workload(results)),
        machine=asked.machine(),
        tables=[table for result in results for table in _tables(result, asked.price)],
        claims=[claim for result in results for claim in claims_of(result)],
        notes=[
            *(line for result in results for line in result.on_first().unavailable()),
            *_notes(uninstalled),
        ],
    )


def _workload(results: Sequence[GridResult]) -> Iterator[str]:
    for result in results:
        scope, effort = result.scope, result.scope.effort
        yield (
            f"{result.shown}. Requests of {listed(scope.batches)} texts, each of exactly {listed(scope.lengths)} "
            f"tokens, special ones included: words that are one token each, drawn with a fixed seed. "
            f"{listed(scope.cores)} cores, as far as the machine has them, shared by {listed(scope.copies)} copies of "
            f"the model: each in a process of its own, one system at a time. A cell is {effort.seconds:g} s or "
            f"{effort.most} requests to each copy, one after the other, whichever is less, {effort.least} at least, in "
            f"{scope.rounds} rounds together. Times are end to end, from texts to vectors of unit length; p99 is "
            "given from 100 requests on."
        )


def _notes(uninstalled: Sequence[str]) -> Iterator[str]:
    yield (
        "`transformers` is its tokenizer with padding, its model on torch in fp32, and pooling by hand. embedctl is a "
        f"worker's engine, called directly. The publication measured DistilBERT on {INFINITY_CORES} cores; it does not "
        "say whether it counts pooling."
    )
    yield (
        "All texts of a request have the same length, so that no engine pads. The floor is the model's matrix products "
        "alone in fp32; products of bytes may be faster."
    )
    yield f"Medians of the rounds, systems by turns; a cell is noisy if its rounds differ by more than 10 %. {RATIOS}"
    if uninstalled:
        yield f"Not installed, and so not measured: {', '.join(uninstalled)} (`--peers` installs them)."


def _tables(result: GridResult, price: float | None) -> Iterator[Table]:
    if result.runs:
        yield _beside(result)
        yield _systems(result)
        yield _cells(result, price)
    if result.skipped:
        rows = [{"what": what, "why": why, "cells": cells} for what, why, cells in result.skipped]
        columns = (Column("what", "left out"), Column("cells", "cells"), Column("why", "because"))
        title = f"{result.name}: what this machine or this model can't do"
        yield Table(f"{slug(result.name)}-left-out", title, columns, rows)


def _row(comparison: Comparison, each: SystemRuns, price: float | None = None) -> dict[str, object]:
    return comparison.row(each, price, comparison.find(TRANSFORMERS.name))


def _beside(result: GridResult) -> Table:
    """One text a request, length by length, with the published rows."""
    columns = (SYSTEM, Column("length", "tokens"), Column("requests_per_s", "requests", "1/s", 1), _TIMES, *LATENCY)
    rows: list[dict[str, object]] = []
    for length in result.scope.lengths:
        comparison = result.on(GridPlace(*result.shown_on(), length, 1))
        for each in comparison.measured:
            lead = result.leads(each.name).get(length, 0.0)
            behind = each.ours and length in INFINITY and lead < times_published(length)
            rows.append({**_row(comparison, each), "length": length, "_bold": behind})
        names = ("HF Infinity, as published", "transformers, as published")
        for name, rate in zip(names, INFINITY.get(length, ()), strict=False):
            times = rate / INFINITY[length][1]
            rows.append({"length": length, "system": name, "requests_per_s": rate, "times": times, "_published": True})
    note = f"Published: DistilBERT, {INFINITY_CORES} cores. Bold: a smaller lead over transformers than published."
    return Table(
        f"{slug(result.name)}-beside", f"{result.name}: one text a request, {_at(result)}", columns, rows, note
    )


def _systems(result: GridResult) -> Table:
    first = result.on_first()
    rows = [{**_row(first, each), **each.facts()} for each in first.measured]
    note = (
        "Accuracy is of 64 texts, against sentence-transformers on torch in fp32, one text at a time. A setting is "
        "processes × threads, and options."
    )
    columns = (*SYSTEMS[:1], *COMPUTES, *ACCURACY, *SYSTEMS[1:])
    return Table(f"{slug(result.name)}-systems", f"{result.name}: what each system is", columns, rows, note)


def _cells(result: GridResult, price: float | None) -> Table:
    axes = ("cores", "copies", "length", "batch")
    columns = (
        SYSTEM,
        *(Column(name, "tokens" if name == "length" else name) for name in axes),
        *RATES,
        _TIMES,
        FLOOR_SHARE,
        *LATENCY,
        *([] if price is None else [COST]),
    )
    rows = [
        {**_row(comparison, each, price), **{name: getattr(place, name) for name in axes}}
        for place, comparison in result.places()
        for each in comparison.measured
    ]
    note = "Bold: faster than every one of ours of its precision."
    return Table(f"{slug(result.name)}-cells", f"{result.name}: every cell", columns, rows, note)


def claims_of(result: GridResult) -> Iterator[Claim]:
    """The published lead over transformers, beside ours of the same rounds."""
    for system in result.ours():
        lead = {length: times for length, times in result.leads(system.name).items() if length in INFINITY}
        if not lead:
            continue
        what = f"{result.name}, {system.label}"
        least = min(lead.values())
        yield Claim(
            f"{what}: times transformers, one text a request, {_at(result)}",
            CLAIMED_IN_WORDS,
            f"{least:.2f}–{max(lead.values()):.2f} ×, median {median(lead.values()):.2f}",
            met=least >= CLAIMED,
            why="" if least >= CLAIMED else _why(result, system, lead),
        )
        behind = [length for length, times in lead.items() if times < times_published(length)]
        yield Claim(
            f"{what}: the same against the published table, length by length",
            f"{times_published(512):.2f}–{times_published(8):.2f} ×",
            f"as much or more at {len(lead) - len(behind)} of {len(lead)} lengths",
            met=not behind,
            why=f"Less at {listed(behind)} tokens." if behind else "",
        )


def _why(result: GridResult, system: SystemRuns, lead: dict[int, float]) -> str:
    """How much could be gained at the length with the smallest lead."""
    length = min(lead, key=lambda each: lead[each])
    comparison = result.on(GridPlace(*result.shown_on(), length, 1))
    floor, theirs = comparison.floor("fp32"), comparison.find(TRANSFORMERS.name)
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


def listed(values: Sequence[int]) -> str:
    """`1, 2 and 4`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def _at(result: GridResult) -> str:
    cores, copies = result.shown_on()
    return _words(cores, "core") + ("" if copies == 1 else f", {copies} copies")


def _words(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {'copies' if what == 'copy' else f'{what}s'}"
