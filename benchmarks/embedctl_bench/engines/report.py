"""The report of `embedctl bench engines`: who is ranked and who is not, and how far from the floor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from embedctl_bench.engines.results import EnginesResult
from embedctl_bench.engines.workloads import describe_workload
from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.claims import lead_claims, trial
from embedctl_bench.measuring.comparison import PROMISES, Run, SystemRuns, by_promise
from embedctl_bench.measuring.models import slug
from embedctl_bench.measuring.sampling import RATIOS, cost_per_million, is_noisy, spread
from embedctl_bench.report.report import Column, Plot, Report, Series, Table

#: The whole product overlaps tokenising with encoding. A larger multiple of its engine's rate is a fault of the run.
_MOST_SHARE = 1.1
_ERROR = Column("max_abs_error", "max abs error")
_COSINES = (Column("min_cosine", "min cosine", "", 6), Column("mean_cosine", "mean cosine", "", 6))
_FLOOR_COLUMNS = (
    Column("precision", "products in"),
    Column("setting", "setting"),
    Column("seconds", "time", "s", 2),
    Column("spread_percent", "spread", "%", 0),
    Column("tokens_per_s", "tokens", "1/s", 0),
    Column("gflops", "GFLOPS", "", 0),
    Column("times_fp32", "× fp32's", "", 2),
)
_COST = Column("cost_per_million", "cost of a million texts", "", 3)


def _columns(precision: str, price: float | None) -> list[Column]:
    """The columns of a precision's table: what it promises stands beside the rate."""
    return [
        Column("rank", "rank"),
        Column("system", "system"),
        Column("computes", "as loaded"),
        Column("setting", "setting"),
        Column("seconds", "time", "s", 2),
        Column("spread_percent", "spread", "%", 0),
        Column("sentences_per_s", "sentences", "1/s", 0),
        Column("tokens_per_s", "tokens", "1/s", 0),
        *([_ERROR] if precision == "fp32" else _COSINES),
        Column("times_sentence_transformers", "× ST torch fp32", "", 2),
        Column("least_times", "least", "×", 2),
        Column("most_times", "most", "×", 2),
        Column("share_of_floor", "share of floor", "", 2),
        *(_COSINES if precision == "fp32" else [_ERROR]),
        Column("remark", "remark"),
        *([] if price is None else [_COST]),
    ]


_SYSTEM_COLUMNS = (
    Column("system", "system"),
    Column("setting", "setting"),
    Column("versions", "versions"),
    Column("tried", "tried on a sample"),
)


def report(found: Sequence[EnginesResult], asked: Asked) -> Report:
    """The whole report."""
    measured = [result for result in found if result.measured]
    return Report(
        name="engines",
        title="CPU embedding engines, side by side",
        command=asked.command,
        workload=" ".join(_workload(found)),
        machine=asked.machine(),
        tables=[table for result in measured for table in _tables(result, asked.price)],
        plots=[plot for result in measured for plot in _plots(result)],
        claims=[claim for result in measured for claim in lead_claims(result, _where(result))],
        notes=[*(note for result in found for note in _statements(result)), *_notes(found)],
    )


def _where(result: EnginesResult) -> str:
    return f"{result.name}, {result.workload.name}"


def _workload(found: Sequence[EnginesResult]) -> Iterator[str]:
    yield (
        "Paragraphs of Python's own docstrings, the same texts for every system. W1 has lengths as in real corpora; W2 "
        "has long texts. A model larger than all-MiniLM-L6-v2 gets fewer texts in proportion."
    )
    for result in found:
        yield f"{result.shown}, {describe_workload(result.workload)}, {result.rounds} rounds."
        limit = result.model.max_tokens
        if cut := sum(length > limit for length in result.workload.lengths):
            yield f"{result.name} takes {limit} tokens: {cut} of {result.texts} texts are cut."


def _tables(result: EnginesResult, price: float | None) -> Iterator[Table]:
    name = f"{slug(result.name)}-{result.workload.name}"
    for precision in dict.fromkeys(each.precision for each in by_promise(result.measured)):
        yield Table(
            f"{name}-{precision}",
            f"{_where(result)}: {PROMISES[precision]}",
            _columns(precision, price),
            [_row(result, each, rank, price) for rank, each in enumerate(result.ranked(precision), start=1)],
            "Bold: faster than every one of ours of its precision. ST is sentence-transformers; least and most are "
            "those of the rounds. As loaded: the precision that was read back from the loaded system, or our engine. "
            "Accuracy is against ST on torch in fp32. The floor is that of the precision.",
        )
    if any(each.ours for each in result.measured):
        yield _beside(result, name)
    if floors := [each for each in result.floors if each.runs]:
        yield Table(
            f"{name}-floors",
            f"{_where(result)}: the products alone",
            _FLOOR_COLUMNS,
            [_floor_row(result, each) for each in floors],
            "The model's matrix products of these tokens, without padding and without attention, by the fastest "
            "product of torch in each precision.",
        )
    yield Table(
        f"{name}-systems",
        f"{_where(result)}: settings and versions",
        _SYSTEM_COLUMNS,
        [
            {
                "system": each.label,
                "setting": each.setting,
                "versions": ", ".join(map(" ".join, each.versions.items())),
                "tried": "; ".join(trial(tried) for tried in each.tried if len(each.tried) > 1),
            }
            for each in [*(each for each in result.floors if each.runs), *result.measured]
        ],
        "A setting is processes × threads, and options.",
    )


def _beside(result: EnginesResult, name: str) -> Table:
    """Each of ours beside each other system, whatever the precision of either."""
    others = by_promise([each for each in result.measured if not each.ours])
    columns = [
        Column("system", "× the rate of"),
        Column("precision", "promises"),
        *(Column(each.name, each.label) for each in result.measured if each.ours),
    ]
    rows = [
        {
            "system": other.label,
            "precision": PROMISES[other.precision],
            **{each.name: _range(each.ratios(other)) for each in result.measured if each.ours},
        }
        for other in others
    ]
    note = "Median of the rounds in which both ran (least–most). Systems that promise less stand beside those of more."
    return Table(f"{name}-beside", f"{_where(result)}: ours, × each other system", columns, rows, note)


def _range(ratios: Sequence[float]) -> str | None:
    return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else None


def _floor_row(result: EnginesResult, each: SystemRuns[Run]) -> dict[str, object]:
    tokens, base = result.workload.tokens, result.floor("fp32")
    durations = [run.seconds for run in each.runs]
    return {
        "precision": each.computes or each.label,
        "setting": each.setting,
        "seconds": each.seconds,
        "spread_percent": 100 * spread(durations),
        "tokens_per_s": tokens / each.seconds,
        "gflops": result.model.flops_per_token * tokens / each.seconds / 1e9,
        "times_fp32": median(ratios) if base and (ratios := each.ratios(base)) else None,
        "_noisy": is_noisy(durations),
    }


def _row(result: EnginesResult, each: SystemRuns[Run], rank: int, price: float | None) -> dict[str, object]:
    seconds, durations = each.seconds, [run.seconds for run in each.runs]
    flaw = each.flaw(result.tokens)
    ours = result.comparable(each.precision, ours=True)
    ahead = not each.ours and not flaw and bool(ours) and all(each.times(other) > 1 for other in ours)
    times = each.ratios(result.baseline) if result.baseline else []
    floor = result.floor(each.precision)
    shares = each.ratios(floor) if floor else []
    remarks = [f"not ranked: {flaw}" if flaw else "", "ahead of ours" if ahead else "", each.unavailable]
    return {
        "rank": None if flaw else rank,
        "system": each.label,
        "computes": each.computes or None,
        "setting": each.setting,
        "seconds": seconds,
        "spread_percent": 100 * spread(durations),
        "sentences_per_s": result.texts / seconds,
        "tokens_per_s": each.runs[0].tokens / seconds,
        "times_sentence_transformers": median(times) if times else None,
        "least_times": min(times, default=None),
        "most_times": max(times, default=None),
        "share_of_floor": median(shares) if shares else None,
        **each.figures(),
        "cost_per_million": None if price is None else cost_per_million(result.texts / seconds, price),
        "remark": "; ".join(filter(None, remarks)),
        "_bold": ahead,
        "_noisy": is_noisy(durations),
    }


def _plots(result: EnginesResult) -> Iterator[Plot]:
    shown = [*(each for each in result.floors if each.runs), *result.measured]
    tokens = [each.runs[0].tokens for each in shown]
    yield Plot(
        f"{slug(result.name)}-{result.workload.name}-rate",
        f"Tokens per second, {_where(result)}",
        "",
        "tokens/s",
        [
            Series(
                "median of the rounds",
                range(len(shown)),
                [count / each.seconds for count, each in zip(tokens, shown, strict=True)],
                [count / max(run.seconds for run in each.runs) for count, each in zip(tokens, shown, strict=True)],
                [count / min(run.seconds for run in each.runs) for count, each in zip(tokens, shown, strict=True)],
            )
        ],
        kind="bars",
        ticks=[each.label for each in shown],
    )


def _statements(result: EnginesResult) -> Iterator[str]:
    where = _where(result)
    for label, share in result.shares():
        if share:
            yield (
                f"{where}: {label} has {median(share):.2f} ({min(share):.2f}–{max(share):.2f}) × the rate of its "
                "engine called directly."
            )
        if share and median(share) > _MOST_SHARE:
            yield f"**Not to be trusted: {where}**, because the whole product can't be faster than its own engine."
    if result.measured and result.baseline is None:
        yield f"{where}: sentence-transformers on torch was not measured, so there are no ratios to it."
    for each in [*result.floors, *result.systems]:
        if each.unavailable:
            yield f"{where}: {each.label}: not available: {each.unavailable}"


def _notes(found: Sequence[EnginesResult]) -> Iterator[str]:
    yield (
        "Medians of the rounds, systems by turns. No round is repeated; a figure is marked noisy if its rounds differ "
        f"by more than 10 %. {RATIOS} A time is from the texts to their float32 vectors, tokenising included; for the "
        "whole product, from its first claim to the last vector stored."
    )
    tuned = any(len(each.tried) > 1 for result in found for each in result.systems)
    yield (
        "Each system chose the fastest of its settings on a sample, and encoded all texts once before the rounds."
        if tuned
        else "No setting was tried: each system ran at its first one, and encoded all texts once before the rounds."
    )
    yield (
        "A system is not ranked if it encodes fewer tokens than ours, if it promises fp32 and a component of a vector "
        "differs by more than 1e-4 from sentence-transformers on torch in fp32, one text at a time, or if it promises "
        "16 bits and a cosine to these vectors is below 0.999. A system at its default promises what it computes in."
    )
    if uninstalled := list(dict.fromkeys(name for result in found for name in result.uninstalled)):
        yield f"Not installed, and so not measured: {', '.join(uninstalled)} (`--peers` installs them)."
