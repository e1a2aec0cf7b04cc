"""The findings of a run, as a page of Markdown."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tests.chaos.check import Verdict
from tests.chaos.options import DUMMY, Options
from tests.chaos.recovery import Loss

_PACKAGES = ("celery", "kombu", "redis", "numpy")
_MOST_LOGGED = 20
_REAL_PACKAGES = ("torch", "sentence-transformers")


@dataclass
class Outcome:
    """The findings of a run.

    Attributes:
        jobs, faults, deaths, logged: counts by kind.
        hung: orders that did not end, in words.
        verdicts: verdicts on jobs with a problem, by the jobs' numbers.
        recoveries: chunks of killed workers that others took up, by the kind of kill.
        stopped: number of jobs that their error budget ended.
        sick_ends: exit statuses of sick workers that ended without a signal from the harness.
        misjudged: healthy workers that were silent or taken for dead, in words.
        owners_dead, lapsed: deaths of owners and lapsed leases, as jobs report them.
        longest_silence_s: longest silence of a live worker beyond a heartbeat's TTL, explained or not.
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
    producer_runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    logged: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[Loss]] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: int = 0
    sick_ends: Counter[int] = field(default_factory=Counter)
    misjudged: list[str] = field(default_factory=list)
    owners_dead: int = 0
    lapsed: int = 0
    longest_silence_s: float = 0.0

    @property
    def lost(self) -> int:
        return sum(verdict.lost for verdict in self.verdicts.values()) + len(self.hung)

    @property
    def doubled(self) -> int:
        return sum(verdict.doubled for verdict in self.verdicts.values())

    @property
    def wrong_vectors(self) -> int:
        return sum(verdict.wrong_vectors for verdict in self.verdicts.values())

    @property
    def wrong_errors(self) -> int:
        return sum(verdict.wrong_errors for verdict in self.verdicts.values())

    @property
    def other(self) -> int:
        return sum(verdict.other for verdict in self.verdicts.values())

    @property
    def good(self) -> bool:
        counts = (self.lost, self.doubled, self.wrong_vectors, self.wrong_errors, self.other)
        return not any(counts) and not self.left and not self.misjudged


def markdown(outcome: Outcome) -> str:
    """The page."""
    parts = [
        f"# Chaos: {outcome.options.minutes:g} minutes, seed {outcome.options.seed}",
        _table("result", "records", _results(outcome)),
        *_words(outcome),
        _table("run", "", _run(outcome)),
        _table("a chunk that a killed worker held", "seconds from the kill", _recoveries(outcome)),
        _table("fault", "times", outcome.faults.most_common()),
        _table("worker processes that ended", "times", outcome.deaths.most_common()),
        _table("logged by workers as errors", "times", outcome.logged.most_common(_MOST_LOGGED)),
    ]
    return "\n\n".join(parts) + "\n"


def _results(outcome: Outcome) -> list[tuple[str, object]]:
    return [
        ("lost", outcome.lost),
        ("doubled", outcome.doubled),
        ("wrong vectors", outcome.wrong_vectors),
        ("wrong errors", outcome.wrong_errors),
        ("other facts of jobs that are wrong", outcome.other),
        ("jobs, producers and waiters that did not end", len(outcome.hung)),
        ("healthy workers held for dead, or silent", len(outcome.misjudged)),
        ("left over, or not stopped well", len(outcome.left)),
    ]


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
        ("lease_s, reissue_s", f"{options.lease:g}{'' if options.lease_s else ' (the default)'}"),
        ("seconds of faults, then until all jobs ended", f"{outcome.storm_s:.0f}, {outcome.settle_s:.0f}"),
        ("jobs", f"{outcome.jobs.total():,}: {_counts(outcome.jobs)}"),
        ("jobs that their error budget ended", outcome.stopped),
        ("small jobs beside, most for nobody", f"{options.beside:,}"),
        ("records", f"{outcome.records:,}"),
        ("poison among them", f"{outcome.poison.total():,}: {_counts(outcome.poison)}" if outcome.poison else "none"),
        ("chunks", f"{outcome.chunks:,}"),
        ("executions a chunk: mean, most seen", f"{per_chunk:.2f}, {outcome.most_attempts}"),
        ("largest difference of a vector's element", f"{outcome.difference:.1e}" if outcome.difference else "0, exact"),
        ("records blamed by chance, then retried", outcome.blamed),
        ("deaths of owners, lapsed leases, as jobs tell them", f"{outcome.owners_dead}, {outcome.lapsed}"),
        ("sick workers that left by themselves, by status", _statuses(outcome.sick_ends)),
        ("producer processes", outcome.producer_runs),
        ("faults, ended worker processes", f"{outcome.faults.total()}, {outcome.deaths.total()}"),
    ]


def _recoveries(outcome: Outcome) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for kind, losses in outcome.recoveries.items():
        rows.append((f"{kind}: until its ticket was sent again", _spread([loss.reaped_s for loss in losses])))
        rows.append((f"{kind}: until another worker had it", _spread([loss.recovered_s for loss in losses])))
    return rows


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    middle, high, most = np.percentile(seconds, (50, 95, 100)).tolist()
    return f"p50 {middle:.1f}, p95 {high:.1f}, most {most:.1f} of {len(seconds)} chunks"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counter.most_common())


def _statuses(counter: Counter[int]) -> str:
    return ", ".join(f"{count} with {status}" for status, count in counter.items()) or "none"


def _table(first: str, second: str, rows: Iterable[tuple[str, object]]) -> str:
    return "\n".join([f"| {first} | {second} |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
