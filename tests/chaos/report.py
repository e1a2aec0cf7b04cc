"""The findings of a run, as a page of Markdown."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.chaos.check import Verdict
from tests.chaos.options import DUMMY, Options

_PACKAGES = ("celery", "kombu", "redis", "numpy")
_REAL_PACKAGES = ("torch", "sentence-transformers")


@dataclass
class Outcome:
    """The findings of a run.

    Attributes:
        jobs, faults, deaths: counts by kind.
        hung: orders that did not end, in words.
        verdicts: verdicts on jobs with a problem, by the jobs' numbers.
        stopped: number of jobs that their error budget ended.
        sick_ends: exit statuses of sick workers that ended without a signal from the harness.
        misjudged: healthy workers that were silent or taken for dead, in words.
        left: anything else that should not be there at the end, in words.
    """

    options: Options
    redis_version: str
    storm_s: float = 0.0
    settle_s: float = 0.0
    jobs: Counter[str] = field(default_factory=Counter)
    records: int = 0
    poison: Counter[str] = field(default_factory=Counter)
    chunks: int = 0
    claims: int = 0
    most_attempts: int = 0
    difference: float = 0.0
    blamed: int = 0
    guarded_kills: int = 0
    producer_runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: int = 0
    sick_ends: Counter[int] = field(default_factory=Counter)
    misjudged: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (any(count for _, count in self.results()))

    def results(self) -> list[tuple[str, int]]:
        """What must all be 0, in words."""
        verdicts = list(self.verdicts.values())
        return [
            ("lost", sum(verdict.lost for verdict in verdicts) + len(self.hung)),
            ("doubled", sum(verdict.doubled for verdict in verdicts)),
            ("wrong vectors", sum(verdict.wrong_vectors for verdict in verdicts)),
            ("wrong errors", sum(verdict.wrong_errors for verdict in verdicts)),
            ("other facts of jobs that are wrong", sum(verdict.other for verdict in verdicts)),
            ("jobs, producers and waiters that did not end", len(self.hung)),
            ("healthy workers held for dead, or silent", len(self.misjudged)),
            ("left over, or not stopped well", len(self.left)),
        ]


def markdown(outcome: Outcome) -> str:
    """The page."""
    parts = [
        f"# Chaos: {outcome.options.minutes:g} minutes, seed {outcome.options.seed}",
        _table("result", "records", outcome.results()),
        *_words(outcome),
        _table("run", "", _run(outcome)),
        _table("fault", "times", outcome.faults.most_common()),
        _table("worker processes that ended", "times", outcome.deaths.most_common()),
    ]
    return "\n\n".join(parts) + "\n"


def _words(outcome: Outcome) -> list[str]:
    lines = [f"- job {index}: {'; '.join(verdict.words)}" for index, verdict in sorted(outcome.verdicts.items())]
    lines += [f"- {words}" for words in (*outcome.hung, *outcome.misjudged, *outcome.left, *outcome.notes)]
    return ["\n".join(lines)] if lines else []


def _run(outcome: Outcome) -> list[tuple[str, object]]:
    options = outcome.options
    packages = _PACKAGES if options.model == DUMMY else (*_PACKAGES, *_REAL_PACKAGES)
    per_chunk = outcome.claims / outcome.chunks if outcome.chunks else 0.0
    return [
        ("versions", ", ".join([f"Python {platform.python_version()}", f"Redis {outcome.redis_version}"])),
        ("packages", ", ".join(f"{name} {version(name)}" for name in packages)),
        ("machine", f"{_cpu_model()}, {len(os.sched_getaffinity(0))} CPUs"),
        ("model", options.model),
        ("workers, producers", f"{options.workers}, {options.producers}"),
        ("lease_s", f"{options.lease:g}{'' if options.lease_s else ' (the default)'}"),
        ("seconds of faults, then until all jobs ended", f"{outcome.storm_s:.0f}, {outcome.settle_s:.0f}"),
        ("jobs", f"{outcome.jobs.total():,}: {_counts(outcome.jobs)}"),
        ("jobs that their error budget ended", outcome.stopped),
        ("records", f"{outcome.records:,}"),
        ("poison among them", f"{outcome.poison.total():,}: {_counts(outcome.poison)}"),
        ("chunks", f"{outcome.chunks:,}"),
        ("executions a chunk: mean, most seen", f"{per_chunk:.2f}, {outcome.most_attempts}"),
        ("largest difference of a vector's element", f"{outcome.difference:.1e}" if outcome.difference else "0, exact"),
        ("records blamed by chance, then retried", outcome.blamed),
        ("processes of `embedctl up` killed at their moment", outcome.guarded_kills),
        ("sick workers that left by themselves, by status", _counts(outcome.sick_ends)),
        ("producer processes", outcome.producer_runs),
        ("faults, ended worker processes", f"{outcome.faults.total()}, {outcome.deaths.total()}"),
    ]


def _counts(counter: Counter[str] | Counter[int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counter.most_common()) or "none"


def _table(first: str, second: str, rows: Iterable[tuple[str, object]]) -> str:
    return "\n".join([f"| {first} | {second} |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
