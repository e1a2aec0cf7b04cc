"""The report of `embedctl bench matrix`, beside what AWS published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from embedctl_bench.matrix.results import PRICE, PUBLISHED, MatrixCell, MatrixResult, MatrixScope
from embedctl_bench.measuring.accuracy import accuracy_table
from embedctl_bench.measuring.cells import EFFORT, LATENCY, RATE, Bench, Found, listed
from embedctl_bench.measuring.models import slug
from embedctl_bench.measuring.sampling import cost_per_million
from embedctl_bench.report.report import Claim, Column, Plot, Report, Series, Table

#: How far a computed cost may be from the published one ($).
_COST_ERROR = 0.001


def report(results: Sequence[MatrixResult], bench: Bench, scope: MatrixScope) -> Report:
    """The whole report."""
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
        workload=_workload(results, scope),
        machine=asked.machine(),
        tables=tables,
        plots=plots,
        claims=_claims(),
        notes=[bench.noise.note(scope.rounds, scope.repeats), *_notes(asked.price)],
    )


def _workload(results: Sequence[MatrixResult], scope: MatrixScope) -> str:
    effort = scope.effort
    return (
        f"Models: {'; '.join(each.shown for each in results)}. Requests of {listed(scope.batches)} texts, each of "
        f"exactly {listed(scope.sequences)} tokens, special ones included: words that are one token each, drawn with a "
        f"fixed seed. {listed(scope.models)} copies of the model, each in a process of its own pinned to an equal "
        f"share of the cores, with {listed(scope.workers)} concurrent requests in each. A cell is measured for "
        f"{effort.seconds:g} s or {effort.most} requests, whichever is less, and {effort.least} requests at least, in "
        f"{scope.rounds} rounds together. Latency is end to end, from texts to vectors of unit length, tokenising and "
        "waiting for the other request included; p99 is given from 100 requests on."
    )


def _notes(price: float | None) -> Iterator[str]:
    yield (
        "The publication measured an accelerator, and these classes run on CPUs unless they say otherwise: compare "
        "costs, at the price of the machine, rather than rates. Here the time includes tokenising; the publication "
        "does not say whether its time does."
    )
    yield "All texts of a request have the same length, so that no engine pads: see `embedctl bench study` for padding."
    if price == PRICE:
        yield (
            f"Costs are computed with the publication's price of an hour, ${PRICE}, which is not this machine's: give "
            "`--price` for yours."
        )


def _published() -> Table:
    columns = (
        Column("what", "published"),
        Column("per_s", "inferences/s", digits=3),
        Column("cost", "cost of 1M", "$", 3),
        Column("reckoned", "computed here", "$", 3),
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
    note = (
        f"Cost of a million = 10⁶ / rate × ${PRICE} / 3600. The publication does not say which cells of the matrix "
        "these two are."
    )
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


def _cells(result: MatrixResult, price: float | None) -> Table:
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


def _order(cell: MatrixCell) -> tuple[object, ...]:
    return cell.system.name, cell.sequence, cell.found.batch, cell.models, cell.workers


def _plots(result: MatrixResult, price: float | None) -> list[Plot]:
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
