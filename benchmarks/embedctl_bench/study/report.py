"""The report of `embedctl bench study`, beside what the study published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from embedctl_bench.measuring.cells import EFFORT, LATENCY, Bench
from embedctl_bench.measuring.models import slug
from embedctl_bench.measuring.sampling import RATIOS, percentiles
from embedctl_bench.measuring.texts import digest, sentences
from embedctl_bench.peers.registry import FLOOR, System
from embedctl_bench.report.report import Claim, Column, Plot, Report, Series, Table
from embedctl_bench.study.results import INT8, SETUPS, Setup, StudyResult, StudyScope, times_published

#: From the published table: weights in MB before and after, and the mean cosine of int8.
PUBLISHED_MB, PUBLISHED_COSINE = (88, 23), 0.962
_MB = 1e6
_SHOWN = tuple(column for column in LATENCY if column.key in ("p50_ms", "p95_ms", "p99_ms"))


def report(results: Sequence[StudyResult], setups: Sequence[Setup], bench: Bench, scope: StudyScope) -> Report:
    """The whole report."""
    asked = bench.asked
    tables = [table for result in results for table in (_rows(result, setups, asked.price), _sweep(result))]
    return Report(
        name="study",
        title="ONNX, int8 and batching against torch with one text at a time",
        command=asked.command,
        workload=_workload(results, scope),
        machine=asked.machine(),
        tables=tables,
        plots=[plot for result in results for plot in _plots(result, setups, asked.price)],
        claims=[claim for result in results for claim in _claims(result)],
        notes=[*_statements(results), f"{bench.noise.note(scope.rounds, scope.repeats)} {RATIOS}", *_notes()],
    )


def _workload(results: Sequence[StudyResult], scope: StudyScope) -> str:
    texts = sentences(scope.texts)
    words = [len(text.split()) for text in texts]
    latency = scope.latency
    return (
        f"Models: {'; '.join(each.shown for each in results)}. {len(texts)} sentences of Python's language reference, "
        f"{min(words)} to {max(words)} words each (sha256 {digest(texts)}…): the vectors of all are compared, and "
        f"requests are made of the first {scope.requested}, again and again. Latency: {latency.most} "
        f"requests or {latency.seconds:g} s, whichever is less, each from its texts to its vectors. Sustained: "
        f"{scope.sustained.seconds:g} s of one request after the other. Sweep: {scope.sweep.seconds:g} s a cell. All "
        f"in {scope.rounds} rounds together, every system in a process of its own on the same CPUs, one at a time."
    )


def _notes() -> Iterator[str]:
    yield (
        "torch is `SentenceTransformer.encode`, a request as one batch. ONNX in fp32 is embedctl's backend `onnx`, "
        "int8 its class `cpu-int8`, both in the steps of a worker: a request is sorted by length and cut into batches "
        "within the token budget."
    )
    yield (
        "A latency is that of a whole request: a request of 32 texts is one sample. Cosines are with vectors from "
        "torch in fp32, one text at a time. Costs are per million texts, an MB is 10⁶ bytes, and peak memory is that "
        "of a fresh process with all its libraries. The published study's costs are off by a factor of a thousand, its "
        "latencies of batches are those of single texts, and its least cosine is 0.918 on 20 texts, below its own bar "
        "of 0.95."
    )
    yield (
        "Padding: positions that are computed beyond the texts' tokens. The floor: the model's matrix products alone, "
        "for the tokens without padding, with torch's fastest product on this machine."
    )


def _rows(result: StudyResult, setups: Sequence[Setup], price: float | None) -> Table:
    columns = (
        Column("setup", "configuration"),
        Column("texts_per_s", "texts/s sustained", digits=1),
        Column("times", "× first row", digits=2),
        *_SHOWN,
        Column("weights_mb", "weights", "MB", 1),
        Column("peak_mb", "peak memory", "MB", 0),
        Column("mean_cosine", "mean cosine", digits=4),
        Column("min_cosine", "min cosine", digits=4),
        Column("max_abs_error", "max abs error"),
        *([Column("cost_per_million", "cost of 1M texts", "$", 4)] if price is not None else []),
        *EFFORT,
    )
    rows: list[dict[str, object]] = []
    for setup in setups:
        rows.append(_row(result, setup, price))
        if setup.published:
            rows.append(_published(setup))
    engines = dict.fromkeys(f"{setup.label}: {facts['engine']}" for setup, facts in result.memory.items())
    note = "Bold: a smaller multiple of the first row than published. " + "; ".join(engines) + "."
    return Table(f"{slug(result.model.name)}-rows", f"{result.model.name}: configurations", columns, rows, note)


def _row(result: StudyResult, setup: Setup, price: float | None) -> dict[str, object]:
    row: dict[str, object] = {}
    if found := result.sustained.get(setup.label):
        row |= found.row(price)
    if latency := result.latency.get(setup.label):
        samples = latency.samples.latencies
        row |= {f"{name}_ms": value for name, value in percentiles(samples).items()} | {"samples": len(samples)}
    if memory := result.memory.get(setup):
        row |= {"weights_mb": memory["weights"] / _MB, "peak_mb": memory["peak"] / _MB}
    if accuracy := result.accuracy.get(setup.label):
        row |= {**accuracy, "max_abs_error": f"{accuracy['max_abs_error']:.1e}"}
    return {**row, "setup": setup.label, "times": result.times_first(setup), "_bold": result.is_behind(setup)}


def _published(setup: Setup) -> dict[str, object]:
    int8, first = setup.system == INT8, setup == SETUPS[0]
    return {
        "setup": f"{setup.label}, as published",
        "texts_per_s": setup.published,
        "times": times_published(setup),
        "weights_mb": PUBLISHED_MB[int8] if int8 or first else None,
        "mean_cosine": PUBLISHED_COSINE if int8 else None,
        "_published": True,
    }


def _sweep(result: StudyResult) -> Table:
    columns = (
        Column("system", "system"),
        Column("batch", "batch"),
        Column("texts_per_s", "texts/s", digits=1),
        *_SHOWN,
        Column("padding_percent", "padding", "%", 0),
        Column("share_of_floor", "share of floor", digits=2),
        *EFFORT,
    )
    rows = [
        {
            "system": system.name,
            **found.row(),
            "padding_percent": _percent(result.padding.get((system, batch))),
            "share_of_floor": _share(result, system, batch),
        }
        for (system, batch), found in sorted(result.sweep.items(), key=lambda each: (each[0][0].name, each[0][1]))
    ]
    note = "The floor is in fp32; products of bytes may be faster."
    return Table(f"{slug(result.model.name)}-sweep", f"{result.model.name}: by batch", columns, rows, note)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _share(result: StudyResult, system: System, batch: int) -> float | None:
    """The system's rate as a share of the floor's at the same batch."""
    floor = result.sweep.get((FLOOR, batch))
    return result.sweep[system, batch].times(floor) if floor else None


def _plots(result: StudyResult, setups: Sequence[Setup], price: float | None) -> Iterator[Plot]:
    name, model = slug(result.model.name), result.model.name
    shown = [setup for setup in setups if setup.label in result.sustained]
    if not shown:
        return
    of_study = [at for at, setup in enumerate(shown) if setup.published]
    yield Plot(
        f"{name}-rows",
        f"{model}: times torch with one text at a time",
        "",
        "times the first row",
        [
            Series("here", range(len(shown)), [result.times_first(setup) or 0.0 for setup in shown]),
            Series("published, other hardware", of_study, [times_published(shown[at]) for at in of_study]),
        ],
        kind="bars",
        ticks=[setup.label for setup in shown],
    )
    if not result.sweep:
        return
    sweep = result.sweep
    rates = _by_batch({key: found.rate for key, found in sweep.items()})
    yield Plot(f"{name}-throughput", f"{model}: throughput", "batch", "texts/s", rates, log_x=True, log_y=True)
    measured = [key for key in sweep if key[0] != FLOOR]
    latencies = _by_batch({key: percentiles(sweep[key].samples.latencies)["p50"] or 0.0 for key in measured})
    yield Plot(f"{name}-latency", f"{model}: p50 of a request", "batch", "ms", latencies, log_x=True, log_y=True)
    shares = _by_batch({key: share for key in measured if (share := _share(result, *key)) is not None})
    yield Plot(f"{name}-floor", f"{model}: share of the floor", "batch", "share", shares, log_x=True)
    padding = _by_batch({key: 100 * share for key, share in result.padding.items()})
    yield Plot(f"{name}-padding", f"{model}: padding", "batch", "% of the tokens", padding, log_x=True)
    if price is not None:
        costs = _by_batch({key: sweep[key].cost(price) for key in measured})
        title = f"{model}: cost of a million texts at ${price:g} an hour"
        yield Plot(f"{name}-cost", title, "batch", "$", costs, log_x=True, log_y=True)


def _by_batch(values: Mapping[tuple[System, int], float]) -> list[Series]:
    """A line for each system."""
    batches: dict[System, list[int]] = {}
    for system, batch in sorted(values, key=lambda key: key[1]):
        batches.setdefault(system, []).append(batch)
    return [Series(system.name, each, [values[system, batch] for batch in each]) for system, each in batches.items()]


def _claims(result: StudyResult) -> Iterator[Claim]:
    first, last, model = SETUPS[0], SETUPS[-1], result.model.name
    times, published = result.times_first(last), times_published(last)
    if times is not None:
        yield _claim(f"{model}: int8 batched, times torch with one text at a time", published, times, _why(result))
    if first in result.memory and last in result.memory:
        before, after = (result.memory[setup]["weights"] / _MB for setup in (first, last))
        smaller, least = before / after, PUBLISHED_MB[0] / PUBLISHED_MB[1]
        yield Claim(
            f"{model}: weights",
            f"{PUBLISHED_MB[0]} → {PUBLISHED_MB[1]} MB",
            f"{before:.1f} → {after:.1f} MB",
            met=smaller >= least,
            why="" if smaller >= least else f"{smaller:.2f} times smaller, and {least:.2f} times there.",
        )
    if accuracy := result.accuracy.get(last.label):
        why = f"The least of these texts' cosines is {accuracy['min_cosine']:.4f}."
        yield _claim(f"{model}: mean cosine of int8", PUBLISHED_COSINE, accuracy["mean_cosine"], why, digits=4)


def _claim(what: str, published: float, ours: float, why: str, *, digits: int = 2) -> Claim:
    met = ours >= published
    return Claim(what, f"{published:.{digits}f}", f"{ours:.{digits}f}", met, "" if met else why)


def _why(result: StudyResult) -> str:
    """The gain of each change, here and in the publication."""
    steps = [
        f"{setup.label} {times:.2f} × here and {times_published(setup):.2f} × there"
        for setup in SETUPS[1:]
        if (times := result.times_first(setup)) is not None
    ]
    return "Over torch with one text at a time: " + "; ".join(steps) + "."


def _statements(results: Sequence[StudyResult]) -> Iterator[str]:
    """In bold: figures below the published ones, and rows in which torch is ahead of us."""
    for result in results:
        model = result.model.name
        for setup in SETUPS:
            if result.is_behind(setup):
                yield (
                    f"**{model}: {setup.label} is {result.times_first(setup):.2f} × the first row, less than the "
                    f"{times_published(setup):.2f} × published.**"
                )
        for setup in (setup for setup in result.memory if setup.system.ours):
            ours = result.sustained.get(setup.label)
            torch = next((result.sustained.get(each.label) for each in SETUPS[:2] if each.batch == setup.batch), None)
            if ours and torch and (times := ours.times(torch)) < 1:
                yield f"**{model}: torch is ahead of {setup.label}, which has {times:.2f} × its rate.**"
