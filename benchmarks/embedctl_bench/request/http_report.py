"""The report of `embedctl bench request --http`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from embedctl_bench.asking import Asked
from embedctl_bench.measuring.comparison import (
    ACCURACY,
    LATENCY,
    RATES,
    SYSTEM,
    SYSTEMS,
    UNKNOWN,
    Comparison,
    Run,
    SystemRuns,
)
from embedctl_bench.peers.registry import INFINITY_SERVER
from embedctl_bench.report.report import Claim, Column, Report, Table
from embedctl_bench.request.loads import Load

#: One text through the gateway takes at most so much longer than with the engine in the server's process (ms).
_BEHIND_MS = 5.0
_COLUMNS = (
    Column("load", "load"),
    SYSTEM,
    *(column for column in LATENCY if column.key != "p95_ms"),
    *RATES,
    Column("requests_per_s", "requests", "1/s", 2),
    Column("times", "× infinity", "", 2),
)


@dataclass(slots=True)
class HttpResult:
    """All loads of one model with one class, and the runs of the servers."""

    name: str
    hardware: str
    loads: Sequence[Load]
    runs: Sequence[SystemRuns] = field(default_factory=list)

    def on(self, load: Load) -> Comparison:
        """What was measured so far with a load."""
        runs = [each.on(load.name) for each in self.runs]
        return Comparison(f"{load.words} ({self.name}, class {self.hardware})", load.texts, len(load.requests), runs)


def http_report(found: Sequence[HttpResult], asked: Asked) -> Report:
    """All models and classes, as far as they were measured."""
    return Report(
        name="request-http",
        title="Requests over HTTP",
        command=asked.command,
        workload=(
            "Every server runs on the same CPUs as the callers, with the same model, and gets each load by turns; the "
            "others are idle meanwhile. A caller has a connection of its own, sends a request to `/v1/embeddings`, and "
            "its next one when that is answered. Vectors come in base64, as OpenAI's clients ask for them; they are "
            "read when the time is taken. The gateway may take ten minutes for an answer; its default is one. Texts "
            "are English words drawn at random, each one token of BERT's."
        ),
        machine=asked.machine(),
        tables=[table for at, result in enumerate(found) for table in _tables(result, f"-{at}" if at else "")],
        claims=[claim for result in found for claim in claims_of(result)],
        notes=[note for result in found for note in result.on(result.loads[0]).unavailable()],
    )


def claims_of(result: HttpResult) -> Iterator[Claim]:
    """That the gateway is ahead of infinity in rate, and not far behind an engine in the server's process."""
    for load in result.loads:
        comparison = result.on(load)
        ours, direct = (comparison.find(f"{name}-{result.hardware}") for name in ("gateway", "direct"))
        infinity = comparison.find(INFINITY_SERVER.name)
        if ours and infinity and ours.ratios(infinity):
            lead = ours.times(infinity)
            yield Claim(
                what=f"the gateway is ahead of infinity's server: {comparison.where}",
                published="–",
                ours=f"{lead:.2f} × its rate",
                met=lead >= 1,
                why="" if lead >= 1 else UNKNOWN,
            )
        if load.is_single and ours and direct and (rounds := behind_ms(ours, direct)):
            behind = statistics.median(rounds)
            yield Claim(
                what=f"at most {_BEHIND_MS:g} ms behind the same engine in the server's process: {comparison.where}",
                published="–",
                ours=f"p50 {behind:.1f} ms behind ({min(rounds):.1f} to {max(rounds):.1f} in {len(rounds)} rounds)",
                met=behind <= _BEHIND_MS,
                why="" if behind <= _BEHIND_MS else UNKNOWN,
            )


def behind_ms(ours: SystemRuns, other: SystemRuns) -> list[float]:
    """How much larger our median latency is than another one's, in each round in which both ran (ms)."""
    these, those = (each.rounds.each(_median_ms).turns for each in (ours, other))
    return [these[turn] - those[turn] for turn in these if turn in those]


def _median_ms(run: Run) -> float:
    return 1000 * statistics.median(run.latencies)


def _tables(result: HttpResult, suffix: str) -> Iterator[Table]:
    rows = []
    for load in result.loads:
        comparison = result.on(load)
        for each in (run for run in comparison.systems if run.runs):
            infinity = comparison.find(INFINITY_SERVER.name)
            times = each.times(infinity) if infinity and each.name != infinity.name else None
            rows.append({**comparison.row(each), "load": load.words, "times": times, "_bold": False})
    yield Table(
        f"http{suffix}",
        f"{result.name}, class {result.hardware}",
        _COLUMNS,
        rows,
        "Percentiles are of all requests of all rounds together; a 99th needs 100. Rates are medians of the rounds; a "
        "ratio is the median of those of the rounds, and so is how far a p50 is behind. The spread is (most less "
        "least) / median.",
    )
    servers = [each.on(result.loads[0].name) for each in result.runs]
    facts = result.on(result.loads[0])
    yield Table(
        f"http-servers{suffix}",
        f"{result.name}: the servers",
        (*SYSTEMS, *ACCURACY),
        [{**facts.row(each), **each.facts()} for each in servers if each.runs],
        "Accuracy is of vectors that were compared with those of torch in fp32 before anything was timed.",
    )
