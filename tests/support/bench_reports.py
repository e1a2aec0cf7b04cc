"""A report that contains everything a report can have, with made-up figures."""

from __future__ import annotations

from math import nan

from embedctl_bench.report.report import Claim, Column, Plot, Report, Series, Table

LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)


def sample_report() -> Report:
    return Report(
        name="sample",
        title="A sample of a report, with <angle brackets> & an ampersand",
        command="embedctl bench sample --model all-MiniLM-L6-v2 --class cpu --cpus 0-1 -o report/",
        workload="Jobs of **255 texts** of 2,670–2,973 characters, 10 in flight; `--quick` takes a tenth. 1 < 2 & 3.",
        machine={
            "CPU": "A Processor",
            "instructions": "avx2 fma avx512f avx512_vnni",
            "virtual machine": True,
            "versions": {"embedctl": "0.1.0", "torch": "2.13.0"},
            "load before": "0.12",
        },
        claims=[
            Claim("int8 is ≥ 2.5 × sentence-transformers", "0.10 against 0.04 requests/s: 2.5 ×", "2.9 ×", met=True),
            Claim(
                "the last row is ≥ 8.8 × the first",
                "68 → 602 req/s: 8.8 ×",
                "4.1 ×",
                met=False,
                why="Of **two** cores here the first row already uses both; see `threads`.",
            ),
        ],
        tables=[_requests(), _wide()],
        plots=[_throughput(), _bars()],
        notes=["Every ratio is of one run.", "**No** peer was `installed`."],
    )


def _requests() -> Table:
    return Table(
        "requests",
        "Requests per second",
        [
            Column("system", "system"),
            Column("rate", "requests", "1/s", 2),
            Column("p99", "p99", "ms", 1),
            Column("exact", "exact"),
        ],
        [
            {"system": "embedctl, class cpu", "rate": 0.123456, "p99": 1234.567, "exact": True, "_bold": True},
            {"system": "sentence-transformers | torch", "rate": 0.05, "p99": None, "exact": False, "_noisy": True},
            {"system": "<script>alert(1)</script>", "rate": nan, "p99": 3, "exact": True},
            {"system": "infinity, its documentation", "rate": 0.10, "_published": True},
        ],
        note="A note with `code`, and what is **bold**.",
    )


def _wide() -> Table:
    return Table(
        "lengths",
        "A table wider than a phone",
        [Column("system", "system"), *(Column(f"l{n}", f"length {n}", "req/s", 1) for n in LENGTHS)],
        [{"system": f"system {number}", **{f"l{n}": 3000 / n / number for n in LENGTHS}} for number in range(1, 5)],
    )


def _throughput() -> Plot:
    published = (248, 212, 150, 97, 55, 27, 17, 12)
    series = [
        Series(f"system {k}", LENGTHS, *([y / k * share for y in published] for share in (1, 0.9, 1.05)))
        for k in (1, 2)
    ]
    return Plot(
        "throughput",
        "Throughput by length at $0.758 and $1 an hour",
        "length (tokens)",
        "requests/s",
        [*series, Series("published, other hardware", LENGTHS, [49, 50, 40, 28, 18, 9, 5, 4])],
        log_x=True,
        log_y=True,
    )


def _bars() -> Plot:
    return Plot(
        "systems",
        "Requests per second by system, of which one has a name so long that the title is wider than the bars",
        "",
        "requests/s",
        [
            Series("W1", (0, 1, 2), (17.9, 6.1, nan), (17.0, 5.0, nan), (18.5, 7.0, nan)),
            Series("W2", (0, 2), (9.5, 3.25)),
        ],
        kind="bars",
        ticks=("embedctl", "sentence-transformers <torch>", "fastembed"),
    )
