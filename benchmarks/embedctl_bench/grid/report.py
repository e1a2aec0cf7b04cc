"""The report of `embedctl bench grid`, beside what Hugging Face published of Infinity."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from embedctl_bench.grid.results import PUBLISHED, PUBLISHED_CORES, GridPlace, GridResult, GridScope, times_published
from embedctl_bench.measuring.accuracy import accuracy_table
from embedctl_bench.measuring.cells import EFFORT, LATENCY, RATE, STEPS, Bench, listed
from embedctl_bench.measuring.models import slug
from embedctl_bench.measuring.sampling import RATIOS, percentiles
from embedctl_bench.peers.registry import FLOOR, TRANSFORMERS, System, class_entry
from embedctl_bench.report.report import Claim, Column, Plot, Report, Series, Table
from embedctl_config.settings import Settings

#: The least lead over transformers that the publication claims.
CLAIMED, _CLAIMED_IN_WORDS = 4.0, "4–6 ×"
_PERCENTILES = ("p50", "p95", "p99")


def report(results: Sequence[GridResult], bench: Bench, scope: GridScope, uninstalled: Sequence[str]) -> Report:
    """The whole report."""
    asked = bench.asked
    tables = [table for result in results for table in _tables(result, scope, asked.price)]
    if bench.skipped:
        tables.append(bench.skipped_table("left-out"))
    return Report(
        name="grid",
        title="Cores × lengths × batches, end to end",
        command=asked.command,
        workload=_workload(results, scope),
        machine=asked.machine(),
        tables=tables,
        plots=[plot for result in results for plot in _plots(result, scope, asked.price)],
        claims=[claim for result in results for claim in _claims(result, asked.settings)],
        notes=[
            *(line for result in results for line in _statements(result, asked.settings)),
            f"{bench.noise.note(scope.rounds, scope.repeats)} {RATIOS}",
            *_notes(uninstalled),
        ],
    )


def _workload(results: Sequence[GridResult], scope: GridScope) -> str:
    effort = scope.effort
    return (
        f"Models: {'; '.join(each.shown for each in results)}. Requests of {listed(scope.batches)} texts, each of "
        f"exactly {listed(scope.lengths)} tokens, special ones included: words that are one token each, drawn with a "
        f"fixed seed. {listed(scope.cores)} cores, as far as the machine has them: each system in a process of its own "
        f"on the first cores, with a thread for each core, one at a time. A cell is {effort.seconds:g} s or "
        f"{effort.most} requests one after the other, whichever is less, and {effort.least} at least, in "
        f"{scope.rounds} rounds together. Times are end to end, from texts to vectors of unit length: pre-process "
        "(tokenising, batches, padding), prediction (the model) and post-process (unit length, and pooling if the "
        "model does not include it). p99 is given from 100 requests on."
    )


def _notes(uninstalled: Sequence[str]) -> Iterator[str]:
    yield (
        "`transformers` is its tokenizer with padding, its model on torch in fp32, and pooling by hand. The "
        f"publication measured DistilBERT on {PUBLISHED_CORES} cores; it does not say whether it counts pooling."
    )
    yield (
        "All texts of a request have the same length, so that no engine pads: see `embedctl bench study` for padding. "
        "The floor is the model's matrix products alone in fp32, with torch's fastest product for that number of "
        "tokens; products of bytes may be faster."
    )
    if uninstalled:
        yield f"Not installed, and so not measured: {', '.join(uninstalled)} (`--peers` installs them)."


def _tables(result: GridResult, scope: GridScope, price: float | None) -> Iterator[Table]:
    if not result.cells:
        return
    yield _beside(result, scope)
    for system in result.ours:
        yield _lead(result, scope, system)
    yield accuracy_table(result.model, result.accuracy, result.systems)
    yield _cells(result, price)


def _beside(result: GridResult, scope: GridScope) -> Table:
    """One text a request, length by length, with the published rows."""
    cores = result.at_cores()
    columns = (
        Column("system", "system"),
        Column("length", "tokens"),
        Column("requests_per_s", "requests/s", digits=1),
        Column("times", "× transformers", digits=2),
        *(column for column in LATENCY if column.label in _PERCENTILES),
    )
    rows: list[dict[str, object]] = []
    for length in scope.lengths:
        place = GridPlace(cores, length, 1)
        for system in result.systems:
            if found := result.cells.get(place, {}).get(system.name):
                times = result.times(place, system)
                behind = system.ours and times is not None and times < times_published(length)
                rows.append({**found.row(), "length": length, "system": system.name, "times": times, "_bold": behind})
        infinity, transformers = PUBLISHED[length]
        for name, rate in (("HF Infinity, as published", infinity), ("transformers, as published", transformers)):
            times = rate / transformers
            rows.append({"length": length, "system": name, "requests_per_s": rate, "times": times, "_published": True})
    note = f"Published: DistilBERT, {PUBLISHED_CORES} cores. Bold: a smaller lead over transformers than published."
    title = f"{result.model.name}: one text a request, {_cores(cores)}"
    return Table(f"{slug(result.model.name)}-beside", title, columns, rows, note)


def _lead(result: GridResult, scope: GridScope, system: System) -> Table:
    """The rate as a multiple of transformers', by length and batch."""
    cores = result.at_cores()
    columns = (
        Column("length", "tokens"),
        *(Column(f"batch_{batch}", f"batch {batch}", digits=2) for batch in scope.batches),
    )
    rows = [
        {
            "length": length,
            **{f"batch_{batch}": result.times(GridPlace(cores, length, batch), system) for batch in scope.batches},
        }
        for length in scope.lengths
    ]
    title = f"{result.model.name}: {system.name}, times transformers, {_cores(cores)}"
    return Table(f"{slug(result.model.name)}-{slug(system.hardware)}-lead", title, columns, rows)


def _cells(result: GridResult, price: float | None) -> Table:
    columns = (
        Column("system", "system"),
        Column("cores", "cores"),
        Column("length", "tokens"),
        Column("batch", "batch"),
        *RATE,
        Column("times", "× transformers", digits=2),
        Column("share_of_floor", "share of floor", digits=2),
        *LATENCY,
        *STEPS,
        *([Column("cost_per_million", "cost of 1M texts", "$", 4)] if price is not None else []),
        *EFFORT,
    )
    rows = [
        {
            **result.cells[place][system.name].row(price),
            "cores": place.cores,
            "length": place.length,
            "system": system.name,
            "times": result.times(place, system),
            "share_of_floor": result.times(place, system, FLOOR),
        }
        for place in result.cells
        for system in result.systems
        if system.name in result.cells[place]
    ]
    return Table(f"{slug(result.model.name)}-cells", f"{result.model.name}: every cell", columns, rows)


def _plots(result: GridResult, scope: GridScope, price: float | None) -> Iterator[Plot]:
    if not result.cells:
        return
    name, model, cores = slug(result.model.name), result.model.name, result.at_cores()
    alone = f"one text a request, {_cores(cores)}"
    _, *more, most = scope.batches

    def line(label: str, value: Callable[[GridPlace], float | None], batch: int = 1) -> Iterator[Series]:
        found = [(length, value(GridPlace(cores, length, batch))) for length in scope.lengths]
        if kept := [(length, each) for length, each in found if each is not None]:
            yield Series(label, [length for length, _ in kept], [each for _, each in kept])

    throughput = [
        series
        for system in [*result.systems, FLOOR]
        for series in line(system.name, partial(result.rate, system=system))
    ]
    for at, label in enumerate(("HF Infinity, as published", "transformers, as published")):
        throughput.append(Series(label, scope.lengths, [PUBLISHED[length][at] for length in scope.lengths]))
    yield Plot(f"{name}-throughput", f"{model}: {alone}", "tokens", "requests/s", throughput, log_x=True, log_y=True)
    for system in result.ours:
        lines = [
            series
            for batch in (1, *more, most)
            for series in line(f"batch {batch}", partial(result.times, system=system), batch)
        ]
        lines.append(Series("published, batch 1", scope.lengths, [times_published(each) for each in scope.lengths]))
        title = f"{model}: {system.name}, times transformers, {_cores(cores)}"
        yield Plot(f"{name}-{slug(system.hardware)}-lead", title, "tokens", "×", lines, log_x=True)
        latency = [series for each in _PERCENTILES for series in line(each, partial(_percentile, result, system, each))]
        title = f"{model}: {system.name}, latency, {alone}"
        yield Plot(f"{name}-{slug(system.hardware)}-latency", title, "tokens", "ms", latency, log_x=True, log_y=True)
    shares = [
        series
        for system in [*result.ours, TRANSFORMERS]
        for batch in (1, most)
        for series in line(f"{system.name}, batch {batch}", partial(result.times, system=system, than=FLOOR), batch)
    ]
    yield Plot(f"{name}-floor", f"{model}: share of the floor, {_cores(cores)}", "tokens", "share", shares, log_x=True)
    if price is not None:
        costs = [
            series
            for system in [*result.ours, TRANSFORMERS]
            for series in line(f"{system.name}, batch {most}", partial(_cost, result, system, price), most)
        ]
        title = f"{model}: cost of a million texts at ${price:g} an hour, {_cores(cores)}"
        yield Plot(f"{name}-cost", title, "tokens", "$", costs, log_x=True, log_y=True)


def _percentile(result: GridResult, system: System, which: str, place: GridPlace) -> float | None:
    found = result.cells.get(place, {}).get(system.name)
    return percentiles(found.samples.latencies)[which] if found else None


def _cost(result: GridResult, system: System, price: float, place: GridPlace) -> float | None:
    found = result.cells.get(place, {}).get(system.name)
    return found.cost(price) if found else None


def _claims(result: GridResult, settings: Settings) -> Iterator[Claim]:
    cores = result.at_cores()
    for system in result.ours:
        lead = {
            length: times
            for length in PUBLISHED
            if (times := result.times(GridPlace(cores, length, 1), system)) is not None
        }
        if not lead:
            continue
        least, most, middle = min(lead.values()), max(lead.values()), statistics.median(lead.values())
        yield Claim(
            f"{result.model.name}, {system.name}: times transformers, one text a request, {_cores(cores)}",
            _CLAIMED_IN_WORDS,
            f"{least:.2f}–{most:.2f} ×, median {middle:.2f}",
            met=least >= CLAIMED,
            why=""
            if least >= CLAIMED
            else _why(result, system, lead, class_entry(system.hardware, settings).precision),
        )
        behind = [length for length, times in lead.items() if times < times_published(length)]
        yield Claim(
            f"{result.model.name}, {system.name}: the same against the published table, length by length",
            f"{times_published(512):.2f}–{times_published(8):.2f} ×",
            f"as much or more at {len(lead) - len(behind)} of {len(lead)} lengths",
            met=not behind,
            why=f"Less at {listed(behind)} tokens." if behind else "",
        )


def _why(result: GridResult, system: System, lead: Mapping[int, float], precision: str) -> str:
    """Where the time goes at the length with the smallest lead, and how much could be gained."""
    length = min(lead, key=lambda each: lead[each])
    place = GridPlace(result.at_cores(), length, 1)
    ours, theirs = (result.cells[place][each.name].samples for each in (system, TRANSFORMERS))
    spent = (
        f"At {length} tokens a request takes {1000 / ours.rate:.2f} ms: {1000 * ours.pre_s:.2f} before the model, "
        f"{1000 * ours.predict_s:.2f} in it, {1000 * ours.post_s:.2f} after it; with transformers it takes "
        f"{1000 / theirs.rate:.2f} ms"
    )
    share = result.times(place, TRANSFORMERS, FLOOR)
    if share is None or precision != "fp32":
        return f"{spent}."
    return (
        f"{spent}. The matrix products alone, in fp32, would take {share:.0%} of that, so no engine of that precision "
        f"can be more than {1 / share:.2f} × as fast there, unless its products are faster."
    )


def _statements(result: GridResult, settings: Settings) -> Iterator[str]:
    """In bold: cells in which another system is ahead of a class of ours that promises no more."""
    for system in result.ours:
        promised = class_entry(system.hardware, settings).precision
        for other in (each for each in result.systems if not each.ours and each.precision in ("fp32", promised)):
            ahead = {
                place: times
                for place in result.cells
                if (times := result.times(place, other, system)) is not None and times > 1
            }
            if ahead:
                most = max(ahead, key=lambda place: ahead[place])
                both = sum(result.times(place, other, system) is not None for place in result.cells)
                where = f"{_cores(most.cores)}, {most.length} tokens, batch {most.batch}"
                yield (
                    f"**{result.model.name}: {other.name} is ahead of {system.name} in {len(ahead)} of {both} cells, "
                    f"by up to {ahead[most]:.2f} × ({where}).**"
                )


def _cores(count: int) -> str:
    return f"{count} core" + ("s" if count != 1 else "")
