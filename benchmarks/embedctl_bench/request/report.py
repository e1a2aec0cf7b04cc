"""The report of `embedctl bench request`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.claims import UNKNOWN, lead_claims, trial
from embedctl_bench.measuring.comparison import PROMISES, by_promise
from embedctl_bench.measuring.sampling import RATIOS, cost_per_million
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl_pipeline import CLIENTS
from embedctl_bench.peers.registry import BASELINE
from embedctl_bench.report.report import Claim, Column, Plot, Report, Series, Table
from embedctl_bench.request.published import ACCURACY, OVER_SENTENCE_TRANSFORMERS, ROWS
from embedctl_bench.request.results import RequestResult, RequestRun, RequestShape, RequestSystem
from embedctl_bench.request.texts import LONGEST, REQUESTS, SHORTEST, TEXTS

_ACCURACY = (
    Column("max_abs_error", "max abs error"),
    Column("min_cosine", "min cosine", "", 6),
    Column("mean_cosine", "mean cosine", "", 6),
)
_COLUMNS = (
    Column("system", "system"),
    Column("promise", "promises"),
    Column("computes", "as loaded"),
    Column("requests_per_s", "requests", "1/s", 3),
    Column("sentences_per_s", "sentences", "1/s", 1),
    Column("tokens_per_s", "tokens", "1/s", 0),
    Column("seconds_for_10", f"{REQUESTS} requests", "s", 2),
    Column("spread_percent", "spread", "%", 0),
    Column("times_sentence_transformers", "× ST torch fp32", "", 2),
    *_ACCURACY,
    Column("p50", "p50", "s", 2),
    Column("p95", "p95", "s", 2),
    Column("p99", "p99", "s", 2),
    Column("fetched_s", "fetched", "s", 2),
    Column("remark", "remark"),
)
_COST = Column("cost_per_million", "cost of a million texts", "", 3)
_PUBLISHED_COLUMNS = (
    Column("system", "system"),
    Column("model", "model"),
    Column("hardware", "hardware"),
    Column("requests_per_s", f"requests of {TEXTS} texts", "1/s", 3),
    Column("seconds_for_10", f"{REQUESTS} requests", "s", 1),
    Column("basis", "from"),
)
_SYSTEM_COLUMNS = (
    Column("system", "system"),
    Column("promise", "promises"),
    Column("setting", "setting"),
    *_ACCURACY,
    Column("versions", "versions"),
    Column("tried", "tried on a sample"),
)
_WORDS = (
    "ST is sentence-transformers; as loaded: the precision that was read back from the loaded system; fetched: until "
    "the clients had all vectors."
)
_BOLD = "Bold: faster than every one of ours of its precision."
_OTHER_CONDITIONS = (
    "published of bge-small on 16 virtual CPUs of Cascade Lake, with an HTTP server in between; which of that makes "
    "the difference was not measured"
)


def report(found: Sequence[RequestResult], asked: Asked) -> Report:
    """All models in one report, as far as they were measured."""
    suffixes = [f"-{at}" if at else "" for at in range(len(found))]
    tables: list[Table] = []
    plots: list[Plot] = []
    for results, suffix in zip(found, suffixes, strict=True):
        if results.measured:
            tables += _tables(results, suffix, asked.price)
            plots += _plots(results, suffix)
    machine = asked.machine()
    tables.append(_published([each for each in found if each.measured], str(machine.get("CPU", "this machine"))))
    return Report(
        name="request",
        title=f"Ten requests of {TEXTS} long texts in flight",
        command=asked.command,
        workload=_workload(found),
        machine=machine,
        tables=tables,
        plots=plots,
        claims=[claim for results in found for claim in claims_of(results)],
        notes=[note for results in found for note in _notes(results)],
    )


def claims_of(results: RequestResult) -> Iterator[Claim]:
    """Published and promised figures, beside those of the same rounds."""
    where = f"{results.name}, {results.shape.words}"
    baseline = results.baseline
    for each in results.measured:
        published = OVER_SENTENCE_TRANSFORMERS.get(each.precision)
        if each.ours and published and baseline:
            ratio = each.times(baseline)
            yield Claim(
                what=f"{each.label}, against sentence-transformers on torch ({where})",
                published=f"{published:.1f} × (the fastest in {each.precision} on a CPU)",
                ours=f"{ratio:.2f} ×",
                met=ratio >= published,
                why="" if ratio >= published else _OTHER_CONDITIONS,
            )
    yield from lead_claims(results, where)
    for each in results.measured:
        if each.ours and each.precision == "fp32":
            error = max(run.max_abs_error for run in [*each.runs, *([each.whole] if each.whole else [])])
            yield Claim(
                what=f"{each.label}: vectors are those of torch in fp32 ({results.name}, {len(results.lengths)} texts)",
                published=f"about {ACCURACY:g}, not checked there",
                ours=f"max abs error {error:.1e}",
                met=error <= ACCURACY,
                why="" if error <= ACCURACY else UNKNOWN,
            )


def _workload(found: Sequence[RequestResult]) -> str:
    lengths = [length for results in found[:1] for length in results.lengths]
    words = [
        f"{REQUESTS} requests in flight at once, each of {TEXTS} texts of {SHORTEST:,}–{LONGEST:,} characters: the "
        "shape of infinity's own benchmark, with other texts. The texts are generated, the same on every machine, and "
        "different in each request. A model that truncates before 512 tokens is set to 512 if it has the positions."
    ]
    if lengths:
        mean = sum(lengths) / len(lengths)
        words.append(
            f"A text has {min(lengths)}–{max(lengths)} tokens of {found[0].name}, {mean:.0f} on average, which makes "
            f"{mean * TEXTS:,.0f} a request."
        )
    words += [
        f"{results.name} takes {results.limit} tokens: {cut} of {len(results.lengths)} texts are cut."
        for results in found
        if (cut := sum(length > results.limit for length in results.lengths))
    ]
    words += [
        f"{results.model}: {results.plan.rounds} rounds of {results.shape.words} ({results.shape.texts:,} texts)"
        + (f", then {results.plan.once.words} once" if results.plan.once else "")
        + "."
        for results in found
    ]
    return " ".join(words)


def _tables(results: RequestResult, suffix: str, price: float | None) -> Iterator[Table]:
    """Tables of the rounds, of the runs of the whole shape, and of the systems."""
    yield Table(
        f"rounds{suffix}",
        f"{results.name}: {results.shape.words}, {results.plan.rounds} rounds by turns",
        (*_COLUMNS, _COST) if price is not None else _COLUMNS,
        _rows(results, results.shape, {each.name: each.runs for each in results.measured}, RequestSystem.times, price),
        f"Medians of the rounds; the spread is (most less least) / median. {RATIOS} A request here has "
        f"{' or '.join(map(str, sorted(set(results.shape.sizes))))} texts. Percentiles are of all requests of all "
        f"rounds together; a 99th needs 100. {_WORDS} {_BOLD}",
    )
    whole = {each.name: [each.whole] for each in results.measured if each.whole}
    if results.plan.once and whole:
        yield Table(
            f"whole{suffix}",
            f"{results.name}: {results.plan.once.words}, once",
            _COLUMNS,
            _rows(results, results.plan.once, whole, _times_once, None),
            "One run each, so there is no spread: differences below 10 % say nothing. Ours, and the fastest other "
            f"system of each precision in the rounds. {_BOLD}",
        )
    yield Table(
        f"systems{suffix}",
        f"{results.name}: what each system is, and its accuracy",
        _SYSTEM_COLUMNS,
        [
            {
                **each.accuracy(),
                "promise": PROMISES[each.precision],
                "versions": ", ".join(map(" ".join, each.versions.items())),
                "tried": "; ".join(trial(tried) for tried in each.tried if len(each.tried) > 1),
            }
            for each in results.measured
        ],
        f"Largest difference from torch in fp32 in any run, of {len(results.lengths)} texts, and least cosines. A "
        "setting is processes × threads, and options. "
        + (
            "Each system chose the fastest on a sample of these requests."
            if any(len(each.tried) > 1 for each in results.measured)
            else "None was tried: each system ran at its first one."
        ),
    )


def _times_once(these: RequestSystem, those: RequestSystem) -> float:
    """The rate as a multiple of the other's, in the one run of each."""
    assert these.whole
    assert those.whole
    return those.whole.seconds / these.whole.seconds


def _rows(
    results: RequestResult,
    shape: RequestShape,
    runs: Mapping[str, Sequence[RequestRun]],
    times: Callable[[RequestSystem, RequestSystem], float],
    price: float | None,
) -> list[Mapping[str, object]]:
    """A row for each system that has runs of this shape: by precision, then the fastest first."""
    seconds = {name: median(run.seconds for run in each) for name, each in runs.items()}
    baseline = results.baseline
    rows: list[Mapping[str, object]] = []
    fastest = sorted((each for each in results.measured if each.name in runs), key=lambda each: seconds[each.name])
    for each in by_promise(fastest):
        row = {**each.row(shape, runs[each.name]), "promise": PROMISES[each.precision]}
        flaw = each.flaw(results.tokens)
        ours = [other for other in results.comparable(each.precision, ours=True) if other.name in runs]
        ahead = not each.ours and not flaw and bool(ours) and all(times(each, other) > 1 for other in ours)
        remarks = [flaw, "ahead of ours" if ahead else "", each.unavailable]
        row["times_sentence_transformers"] = times(each, baseline) if baseline and baseline.name in runs else None
        if price is not None:
            row["cost_per_million"] = cost_per_million(shape.texts / seconds[each.name], price)
        rows.append({**row, "remark": "; ".join(filter(None, remarks)), "_bold": ahead})
    return rows


def _published(found: Sequence[RequestResult], cpu: str) -> Table:
    rows: list[Mapping[str, object]] = []
    for results in found:
        for each in results.measured:
            all_texts = TEXTS * REQUESTS
            per_text = each.whole.seconds / all_texts if each.whole else each.seconds / results.shape.texts
            whole = each.whole is not None or results.shape.texts == all_texts
            rows.append(
                {
                    "system": each.label,
                    "model": results.name,
                    "hardware": cpu,
                    "requests_per_s": 1 / (per_text * TEXTS),
                    "seconds_for_10": per_text * TEXTS * REQUESTS,
                    "basis": "measured" if whole else f"{results.shape.words}, by the text",
                }
            )
    rows += [
        {
            "system": row.system,
            "model": row.model,
            "hardware": row.hardware,
            "requests_per_s": row.requests_per_s,
            "seconds_for_10": row.seconds,
            "basis": "infinity 0.0.25, published" + (f"; {row.remark}" if row.remark else ""),
            "_published": True,
        }
        for row in ROWS
    ]
    return Table(
        "published",
        "Beside the published figures",
        _PUBLISHED_COLUMNS,
        rows,
        "Published figures are for other hardware and another model, and through an HTTP server: the two can't be "
        "divided by each other.",
    )


def _plots(results: RequestResult, suffix: str) -> Iterator[Plot]:
    measured = results.measured
    ticks = [each.label for each in measured]
    groups = [float(at) for at in range(len(measured))]
    texts = results.shape.texts
    yield Plot(
        f"rate{suffix}",
        f"Sentences per second, {results.name}, {results.shape.words}",
        "",
        "sentences/s",
        [
            Series(
                "median of the rounds",
                groups,
                [texts / each.seconds for each in measured],
                [texts / max(run.seconds for run in each.runs) for each in measured],
                [texts / min(run.seconds for run in each.runs) for each in measured],
            )
        ],
        kind="bars",
        ticks=ticks,
    )
    rows = [each.row(results.shape, each.runs) for each in measured]
    yield Plot(
        f"latency{suffix}",
        f"How long a request takes with {REQUESTS} in flight, {results.name}, {results.shape.words}",
        "",
        "seconds",
        [Series(name, groups, [float(str(row[name])) for row in rows]) for name in ("p50", "p95")],
        kind="bars",
        ticks=ticks,
    )


def _notes(results: RequestResult) -> Iterator[str]:
    name = results.name
    yield (
        f"{name}: ours is the whole product: a private Redis, workers, and {CLIENTS} processes that submit "
        f"{REQUESTS // CLIENTS} jobs each at once, all on the same CPUs; timed from before the first submit to the "
        "last vector stored in Redis, and once more until the clients had fetched them all. Other systems are called "
        "in their own process without a server: infinity gets all requests in its queue at once; the others have no "
        "queue and get one after the other."
    )
    yield (
        f"{name}: accuracy is of {len(results.lengths)} texts, the first of each request, against "
        "sentence-transformers on torch in fp32, one text at a time."
    )
    missing = [each for each in results.uninstalled if each != BASELINE or not results.baseline]
    if missing:
        yield f"{name}: not installed, and so not measured: {', '.join(missing)} (`--peers` installs them)."
    if results.measured and not results.baseline:
        yield f"{name}: sentence-transformers on torch was not measured, so there are no ratios to it."
    for each in results.systems:
        if each.unavailable:
            yield f"{name}: {each.label}: not available: {each.unavailable}"
