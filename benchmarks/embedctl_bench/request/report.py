"""The report of `embedctl bench request`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from embedctl_bench.asking import Asked
from embedctl_bench.measuring.comparison import (
    ACCURACY,
    COMPUTES,
    COST,
    LATENCY,
    RATES,
    REMARK,
    SECONDS,
    SYSTEM,
    SYSTEMS,
    TIMES,
    TOKENS,
    UNKNOWN,
    Comparison,
    SystemRuns,
    by_promise,
)
from embedctl_bench.measuring.sampling import RATIOS
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl_pipeline import CLIENTS
from embedctl_bench.peers.registry import BASELINE
from embedctl_bench.report.report import Claim, Column, Report, Table
from embedctl_bench.request.loads import Load, RequestPlan
from embedctl_bench.request.published import ACCURACY as PUBLISHED_ACCURACY
from embedctl_bench.request.published import OVER_SENTENCE_TRANSFORMERS, ROWS
from embedctl_bench.texts.words import LONGEST, REQUESTS, SHORTEST, TEXTS

#: The most texts of each request that have references.
_CHECKED = 26
_REQUESTS = Column("requests_per_s", "requests", "1/s", 3)
_COLUMNS = (
    SYSTEM,
    *COMPUTES,
    _REQUESTS,
    *RATES,
    TOKENS,
    SECONDS,
    TIMES,
    *ACCURACY,
    *LATENCY,
    Column("fetched_s", "fetched", "s", 2),
    REMARK,
)
_PUBLISHED_COLUMNS = (
    SYSTEM,
    Column("model", "model"),
    Column("hardware", "hardware"),
    Column("requests_per_s", f"requests of {TEXTS} texts", "1/s", 3),
    Column("seconds", f"{REQUESTS} requests", "s", 1),
    Column("basis", "from"),
)
_WORDS = (
    "ST is sentence-transformers; as loaded: the precision that was read back from the loaded system; fetched: until "
    "the clients had all vectors. Accuracy is the worst of all runs, against torch in fp32. Bold: faster than every "
    "one of ours of its precision."
)
_OTHER_CONDITIONS = (
    "published of bge-small on 16 virtual CPUs of Cascade Lake, with an HTTP server in between; which of that makes "
    "the difference was not measured"
)


@dataclass(slots=True)
class RequestResult:
    """Every system on one model.

    Attributes:
        name: the model as the command line has it.
        shown: the model in words.
        plan: what is run.
        limit: the longest text that the model takes whole, in tokens.
        uninstalled: names of the systems that were left out because they are not installed.
        lengths: of the texts with references, in tokens.
        runs: of the systems.
    """

    name: str
    shown: str
    plan: RequestPlan
    limit: int
    uninstalled: Sequence[str] = ()
    lengths: Sequence[int] = ()
    runs: list[SystemRuns] = field(default_factory=list)

    @property
    def checked(self) -> list[Sequence[str]]:
        """The first texts of each request, which have references. They are in every load of the plan."""
        # Requests of 25 and of 26 texts take turns in a tenth of the shape.
        return [texts[: _CHECKED - (number % 2 == 0)] for number, texts in enumerate(self.plan.load.requests)]

    def on(self, load: Load) -> Comparison:
        """What was measured so far with a load."""
        runs = [each.on(load.name) for each in self.runs]
        return Comparison(f"{self.name}, {load.words}", load.texts, len(load.requests), runs)

    def finalists(self) -> list[str]:
        """Names of ours, and of the fastest other system of each of our precisions."""
        comparison = self.on(self.plan.load)
        others = [other.name for _, other in comparison.pairs()]
        return [each.name for each in comparison.measured if each.ours or each.name in others]


def report(found: Sequence[RequestResult], asked: Asked) -> Report:
    """All models in one report, as far as they were measured."""
    measured = [result for result in found if result.on(result.plan.load).measured]
    machine = asked.machine()
    return Report(
        name="request",
        title=f"Ten requests of {TEXTS} long texts in flight",
        command=asked.command,
        workload=" ".join(_workload(found)),
        machine=machine,
        tables=[
            *(table for at, result in enumerate(measured) for table in _tables(result, f"-{at}" if at else "", asked)),
            _published(measured, str(machine.get("CPU", "this machine"))),
        ],
        claims=[claim for result in found for claim in claims_of(result)],
        notes=[note for result in found for note in _notes(result)],
    )


def claims_of(result: RequestResult) -> Iterator[Claim]:
    """Published and promised figures, beside those of the same rounds."""
    comparison = result.on(result.plan.load)
    baseline = comparison.baseline
    for each in comparison.measured:
        published = OVER_SENTENCE_TRANSFORMERS.get(each.precision)
        if each.ours and published and baseline:
            ratio = each.times(baseline)
            yield Claim(
                what=f"{each.label}, against sentence-transformers on torch ({comparison.where})",
                published=f"{published:.1f} × (the fastest in {each.precision} on a CPU)",
                ours=f"{ratio:.2f} ×",
                met=ratio >= published,
                why="" if ratio >= published else _OTHER_CONDITIONS,
            )
    yield from comparison.lead_claims()
    for each in comparison.measured:
        if each.ours and each.precision == "fp32":
            error = max(run.max_abs_error for rounds in each.loads.values() for run in rounds.counted)
            met = error <= PUBLISHED_ACCURACY
            yield Claim(
                what=f"{each.label}: vectors are those of torch in fp32 ({result.name}, {len(result.lengths)} texts)",
                published=f"about {PUBLISHED_ACCURACY:g}, not checked there",
                ours=f"max abs error {error:.1e}",
                met=met,
                why="" if met else UNKNOWN,
            )


def _workload(found: Sequence[RequestResult]) -> Iterator[str]:
    yield (
        f"{REQUESTS} requests in flight at once, each of {TEXTS} texts of {SHORTEST:,}–{LONGEST:,} characters: the "
        "shape of infinity's own benchmark, with other texts. The texts are generated, the same on every machine, and "
        "different in each request. A model that truncates before 512 tokens is set to 512 if it has the positions."
    )
    for result in found:
        once = f", then {result.plan.once.words} once" if result.plan.once else ""
        load = result.plan.load
        yield f"{result.shown}: {result.plan.rounds} rounds of {load.words} ({load.texts:,} texts){once}."
        if lengths := result.lengths:
            mean = sum(lengths) / len(lengths)
            yield (
                f"A text has {min(lengths)}–{max(lengths)} of its tokens, {mean:.0f} on average, which makes "
                f"{mean * TEXTS:,.0f} a request."
            )
            if cut := sum(length > result.limit for length in lengths):
                yield f"{result.name} takes {result.limit} tokens: {cut} of {len(lengths)} texts are cut."


def _tables(result: RequestResult, suffix: str, asked: Asked) -> Iterator[Table]:
    """Tables of the rounds, of the runs of the whole shape, and of the systems."""
    plan, rounds = result.plan, result.on(result.plan.load)
    columns = _COLUMNS if asked.price is None else (*_COLUMNS, COST)
    sizes = " or ".join(map(str, sorted({len(each) for each in plan.load.requests})))
    yield Table(
        f"rounds{suffix}",
        f"{result.name}: {plan.load.words}, {plan.rounds} rounds by turns",
        columns,
        [rounds.row(each, asked.price) for each in by_promise(rounds.measured)],
        f"Medians of the rounds; the spread is (most less least) / median. {RATIOS} A request here has {sizes} texts. "
        f"Percentiles are of all requests of all rounds together; a 99th needs 100. {_WORDS}",
    )
    if plan.once and (once := result.on(plan.once)).measured:
        yield Table(
            f"whole{suffix}",
            f"{result.name}: {plan.once.words}, once",
            columns,
            [once.row(each, asked.price) for each in by_promise(once.measured)],
            "One run each, so there is no spread: differences below 10 % say nothing. Ours, and the fastest other "
            "system of each precision in the rounds.",
        )
    yield Table(
        f"systems{suffix}",
        f"{result.name}: what each system is",
        SYSTEMS,
        [each.facts() for each in rounds.measured],
        "A setting is processes × threads, and options. "
        + (
            "Each system chose the fastest on a sample of these requests."
            if any(len(each.tried) > 1 for each in rounds.measured)
            else "None was tried: each system ran at its first one."
        ),
    )


def _published(found: Sequence[RequestResult], cpu: str) -> Table:
    rows: list[Mapping[str, object]] = []
    for result in found:
        for each in result.on(result.plan.load).measured:
            load = result.plan.once if result.plan.once and result.plan.once.name in each.loads else result.plan.load
            whole = len(load.requests[0]) == TEXTS
            seconds = each.on(load.name).seconds / load.texts * TEXTS * REQUESTS
            rows.append(
                {
                    "system": each.label,
                    "model": result.name,
                    "hardware": cpu,
                    "requests_per_s": REQUESTS / seconds,
                    "seconds": seconds,
                    "basis": "measured" if whole else f"{load.words}, by the text",
                }
            )
    rows += [
        {
            "system": row.system,
            "model": row.model,
            "hardware": row.hardware,
            "requests_per_s": row.requests_per_s,
            "seconds": row.seconds,
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


def _notes(result: RequestResult) -> Iterator[str]:
    name, comparison = result.name, result.on(result.plan.load)
    yield (
        f"{name}: ours is the whole product: a private Redis, workers, and {CLIENTS} processes that submit "
        f"{REQUESTS // CLIENTS} jobs each at once, all on the same CPUs; timed from before the first submit to the "
        "last vector stored in Redis, and once more until the clients had fetched them all. Other systems are called "
        "in their own process without a server: infinity gets all requests in its queue at once; the others have no "
        "queue and get one after the other."
    )
    yield (
        f"{name}: accuracy is of {len(result.lengths)} texts, the first of each request, against "
        "sentence-transformers on torch in fp32, one text at a time."
    )
    missing = [each for each in result.uninstalled if each != BASELINE or not comparison.baseline]
    if missing:
        yield f"{name}: not installed, and so not measured: {', '.join(missing)} (`--peers` installs them)."
    yield from comparison.without_baseline()
    yield from comparison.unavailable()
