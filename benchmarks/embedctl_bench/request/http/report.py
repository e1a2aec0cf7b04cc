"""The report of `embedctl bench request --http`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.claims import UNKNOWN
from embedctl_bench.report.report import Claim, Column, Report, Table
from embedctl_bench.request.http.results import HttpResult
from embedctl_bench.request.http.servers import DIRECT, GATEWAY, INFINITY

#: One text through the gateway takes at most so much longer than with the engine in the server's process (ms).
_BEHIND_MS = 5.0
_COLUMNS = (
    Column("load", "load"),
    Column("server", "server"),
    Column("p50", "p50", "ms", 1),
    Column("p90", "p90", "ms", 1),
    Column("p99", "p99", "ms", 1),
    Column("texts_per_s", "texts", "1/s", 1),
    Column("requests_per_s", "requests", "1/s", 2),
    Column("spread_percent", "spread", "%", 0),
    Column("times_infinity", "× infinity", "", 2),
)
_SERVERS = (
    Column("server", "server"),
    Column("cosine", "least cosine", "", 6),
    Column("versions", "versions"),
)


def report(found: Sequence[HttpResult], asked: Asked) -> Report:
    """All models and classes, as far as they were measured."""
    measured = [result for result in found if any(load.turns for load in result.loads)]
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
        tables=[table for at, result in enumerate(measured) for table in _tables(result, f"-{at}" if at else "")],
        plots=[],
        claims=[claim for result in measured for claim in claims_of(result)],
        notes=[
            f"{result.name}: {name}: not available: {why}" for result in found for name, why in result.failed.items()
        ],
    )


def claims_of(result: HttpResult) -> Iterator[Claim]:
    """That the gateway is ahead of infinity in rate, and not far behind an engine in the server's process."""
    for each in result.loads:
        where = f"{each.load.words} ({result.name}, class {result.hardware})"
        lead = each.times(GATEWAY, INFINITY)
        if lead is not None:
            yield Claim(
                what=f"the gateway is ahead of infinity's server: {where}",
                published="–",
                ours=f"{lead:.2f} × its rate",
                met=lead >= 1,
                why="" if lead >= 1 else UNKNOWN,
            )
        if each.load.is_single and (rounds := each.behind(GATEWAY, DIRECT)):
            behind = statistics.median(rounds)
            yield Claim(
                what=f"at most {_BEHIND_MS:g} ms behind the same engine in the server's process: {where}",
                published="–",
                ours=f"p50 {behind:.1f} ms behind ({min(rounds):.1f} to {max(rounds):.1f} in {len(rounds)} rounds)",
                met=behind <= _BEHIND_MS,
                why="" if behind <= _BEHIND_MS else UNKNOWN,
            )


def _tables(result: HttpResult, suffix: str) -> Iterator[Table]:
    yield Table(
        f"http{suffix}",
        f"{result.name}, class {result.hardware}",
        _COLUMNS,
        [
            {
                **each.row(server),
                "server": result.labels[server],
                "times_infinity": each.times(server, INFINITY) if server != INFINITY else None,
            }
            for each in result.loads
            for server in result.labels
            if each.turns.get(server)
        ],
        "Percentiles are of all requests of all rounds together; a 99th needs 100. Rates are medians of the rounds; a "
        "ratio is the median of those of neighbouring turns, and so is how far a p50 is behind. The spread is (most "
        "less least) / median.",
    )
    yield Table(
        f"http-servers{suffix}",
        f"{result.name}: the servers",
        _SERVERS,
        [
            {
                "server": label,
                "cosine": result.cosines.get(name),
                "versions": ", ".join(map(" ".join, result.versions[name].items())),
            }
            for name, label in result.labels.items()
        ],
        "Cosines are those of each server's vectors and the first one's.",
    )
