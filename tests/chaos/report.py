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
        facts: what was done, for the page.
        faults, deaths: counts by kind.
        verdicts: verdicts on jobs with a problem, by the jobs' numbers.
        hung: orders that did not end, in words.
        misjudged: healthy workers that were silent or taken for dead, in words.
        left: anything else that should not be there at the end, in words.
    """

    options: Options
    records: int = 0
    facts: list[tuple[str, object]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)
    misjudged: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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
        _table("run", "", [*_conditions(outcome.options), *outcome.facts]),
        _table("fault", "times", outcome.faults.most_common()),
        _table("worker processes that ended", "times", outcome.deaths.most_common()),
    ]
    return "\n\n".join(parts) + "\n"


def _words(outcome: Outcome) -> list[str]:
    lines = [f"- job {index}: {'; '.join(verdict.words)}" for index, verdict in sorted(outcome.verdicts.items())]
    lines += [f"- {words}" for words in (*outcome.hung, *outcome.misjudged, *outcome.left, *outcome.notes)]
    return ["\n".join(lines)] if lines else []


def _conditions(options: Options) -> list[tuple[str, object]]:
    packages = _PACKAGES if options.model == DUMMY else (*_PACKAGES, *_REAL_PACKAGES)
    return [
        (
            "packages",
            ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]),
        ),
        ("machine", f"{_cpu_model()}, {len(os.sched_getaffinity(0))} CPUs"),
        ("model", options.model),
        ("workers, producers", f"{options.workers}, {options.producers}"),
        ("lease_s", f"{options.lease:g}{'' if options.lease_s else ' (the default)'}"),
    ]


def counts(counter: Counter[str] | Counter[int]) -> str:
    """A counter in words, and its total."""
    words = ", ".join(f"{count:,} {name}" for name, count in counter.most_common())
    return f"{counter.total():,}" + (f": {words}" if words else "")


def _table(first: str, second: str, rows: Iterable[tuple[str, object]]) -> str:
    return "\n".join([f"| {first} | {second} |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
