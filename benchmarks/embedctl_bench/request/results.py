"""What `embedctl bench request` measured of each system, and what that says."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from embedctl_bench.measuring.sampling import Rounds, is_noisy, percentiles, spread, times
from embedctl_bench.request.published import ACCURACY

#: A system that encodes fewer tokens than ours by more than this share cuts texts.
_MOST_TOKENS_LOST = 0.005


@dataclass(frozen=True, slots=True)
class Shape:
    """How many texts each request has.

    Attributes:
        words: for people.
    """

    name: str
    words: str
    sizes: tuple[int, ...]

    @property
    def texts(self) -> int:
        """Of all requests."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Run:
    """Requests that were made at once.

    Attributes:
        seconds: from the first submit to the last vector: stored in ours, returned by others.
        fetched: until all had been fetched by the clients (seconds).
        latencies: of each request, as `seconds`.
        max_abs_error, min_cosine, mean_cosine: of the texts that were compared with their references.
    """

    seconds: float
    fetched: float
    tokens: int
    latencies: Sequence[float]
    max_abs_error: float
    min_cosine: float
    mean_cosine: float

    def to_json(self) -> dict[str, Any]:
        """For a step of a session."""
        return asdict(self)

    @classmethod
    def of_json(cls, facts: Mapping[str, Any]) -> Self:
        """As a step has kept it."""
        return cls(**facts)


@dataclass(slots=True)
class Result:
    """One system on one model.

    Attributes:
        name: that of its :class:`~embedctl_bench.peers.registry.System`.
        setting: what it chose, for people; `tried` is all that it chose from.
        rounds: runs of the rounds' shape; `whole` is the one of the whole shape.
        unavailable: why there are none, or no more.
    """

    name: str
    label: str
    precision: str
    ours: bool
    setting: str = ""
    tried: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    rounds: Rounds[Run] = field(default_factory=Rounds)
    whole: Run | None = None
    unavailable: str = ""

    @property
    def runs(self) -> Sequence[Run]:
        """Of the rounds that count."""
        return self.rounds.counted

    @property
    def seconds(self) -> float:
        """Of the median round."""
        return statistics.median(run.seconds for run in self.runs)

    def times(self, other: Result) -> float:
        """How many times the other's rate, in the rounds."""
        return times(other.rounds.each(_duration), self.rounds.each(_duration))

    def flaw(self, tokens: int) -> str:
        """Why it can't be compared with one that encodes this many tokens; empty if it can."""
        run = self.runs[0]
        if run.tokens < (1 - _MOST_TOKENS_LOST) * tokens:
            return f"encodes {run.tokens:,} tokens of {tokens:,}: it cuts texts"
        error = max(run.max_abs_error for run in self.runs)
        if self.precision == "fp32" and not error <= ACCURACY:
            return f"not fp32: max abs error {error:.1e}"
        return ""

    def row(self, shape: Shape, runs: Sequence[Run]) -> dict[str, object]:
        """Its line in a table of runs of a shape."""
        seconds = statistics.median(run.seconds for run in runs)
        waits = percentiles([latency for run in runs for latency in run.latencies])
        several = len(runs) > 1
        return {
            "system": self.label,
            "precision": self.precision,
            "requests_per_s": len(shape.sizes) / seconds,
            "sentences_per_s": shape.texts / seconds,
            "tokens_per_s": runs[0].tokens / seconds,
            "seconds_for_10": seconds,
            "spread_percent": 100 * spread([run.seconds for run in runs]) if several else None,
            "fetched_s": statistics.median(run.fetched for run in runs),
            **{name: _seconds(waits[name]) for name in ("p50", "p95", "p99")},
            "_noisy": several and is_noisy([run.seconds for run in runs]),
        }

    def accuracy(self) -> dict[str, object]:
        """Its line in the table of accuracy: the worst of all runs."""
        runs = [*self.runs, *([self.whole] if self.whole else [])]
        return {
            "system": self.label,
            "setting": self.setting,
            "precision": self.precision,
            "max_abs_error": f"{max(run.max_abs_error for run in runs):.1e}",
            "min_cosine": min(run.min_cosine for run in runs),
            "mean_cosine": min(run.mean_cosine for run in runs),
        }


def _duration(run: Run) -> float:
    return run.seconds


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


@dataclass(slots=True)
class Results:
    """Every system on one model.

    Attributes:
        name: the model as the command line has it.
        shape: of the rounds; `once` is the shape that was run once, if there was one.
        uninstalled: other systems that were left out for that.
        model: the model in words.
        limit: the longest text that it takes whole, in tokens.
        lengths: of the texts that were compared with their references, in tokens.
    """

    name: str
    shape: Shape
    rounds: int
    once: Shape | None
    uninstalled: Sequence[str] = ()
    model: str = ""
    limit: int = 0
    lengths: Sequence[int] = ()
    systems: list[Result] = field(default_factory=list)

    @property
    def measured(self) -> list[Result]:
        """Those with runs, the fastest first."""
        return sorted((each for each in self.systems if each.runs), key=lambda each: each.seconds)

    @property
    def tokens(self) -> int:
        """Of all texts of the rounds' shape: as ours count them, or whoever counts most."""
        counts = [each.runs[0].tokens for each in self.measured if each.ours]
        return max(counts or [each.runs[0].tokens for each in self.measured] or [0])

    def find(self, name: str) -> Result | None:
        """A system with runs, by its name."""
        return next((each for each in self.measured if each.name == name), None)

    def comparable(self, precision: str, *, ours: bool) -> list[Result]:
        """Those of a precision that encode whole texts, and as exactly as they should; the fastest first."""
        return [
            each
            for each in self.measured
            if each.ours == ours and each.precision == precision and not each.flaw(self.tokens)
        ]

    def pairs(self) -> list[tuple[Result, Result]]:
        """The fastest of ours of each precision, and of the others the one that has most of its rate."""
        found = []
        for precision in dict.fromkeys(each.precision for each in self.systems if each.ours and each.runs):
            ours, others = (self.comparable(precision, ours=whose) for whose in (True, False))
            if ours and others:
                found.append((ours[0], max(others, key=lambda each: each.times(ours[0]))))
        return found

    def finalists(self) -> list[str]:
        """Names of ours, and of the fastest other system of each of their precisions."""
        others = [other for _, other in self.pairs()]
        return [each.name for each in self.systems if each.runs and (each.ours or each in others)]
