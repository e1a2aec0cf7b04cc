"""Runs of several systems over the same texts: which can be compared, which is ahead, and their lines in a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import nan
from typing import Any, Self

from embedctl_bench.measuring.sampling import Rounds, cost_per_million, is_noisy, percentiles, ratios, spread
from embedctl_bench.peers.registry import AT_ITS_DEFAULT, BASELINE, SENTENCE_TRANSFORMERS, System
from embedctl_bench.report.report import Claim, Column, Table
from embedctl_config.hardware import PRECISIONS, THRESHOLDS
from embedctl_workers.arrays.distance import measure
from embedctl_workers.arrays.tokens import Vectors

#: A system that encodes fewer tokens than ours by more than this share truncates texts.
_MOST_TOKENS_LOST = 0.005
#: What a report calls each precision that is promised.
PROMISES = {"fp32": "fp32", "fp16": "16 bits (bf16 or fp16)", "int8": "int8"}
#: What a system computes in → the precision that it promises.
_PROMISED = {"fp32": "fp32", "bf16": "fp16", "fp16": "fp16", "int8": "int8"}
#: Why a system is not met or ahead, if that is unknown.
UNKNOWN = "the run does not tell why"

#: Columns for :meth:`Comparison.row`.
SYSTEM = Column("system", "system")
COMPUTES = (Column("promise", "promises"), Column("computes", "as loaded"))
RATES = (Column("texts_per_s", "texts", "1/s", 1), Column("spread_percent", "spread", "%", 0))
TOKENS = Column("tokens_per_s", "tokens", "1/s", 0)
SECONDS = Column("seconds", "time", "s", 2)
TIMES = Column("times", "× ST torch fp32", "", 2)
LATENCY = tuple(Column(f"{each}_ms", each, "ms", 1) for each in ("p50", "p90", "p95", "p99"))
ACCURACY = (
    Column("max_abs_error", "max abs error"),
    Column("min_cosine", "min cosine", "", 6),
    Column("mean_cosine", "mean cosine", "", 6),
)
FLOOR_SHARE = Column("share_of_floor", "share of floor", "", 2)
REMARK = Column("remark", "remark")
COST = Column("cost_per_million", "cost of a million texts", "", 3)
SYSTEMS = (SYSTEM, Column("setting", "setting"), Column("versions", "versions"), Column("tried", "tried on a sample"))


def distance(vectors: Vectors, references: Vectors) -> dict[str, float]:
    """`max_abs_error`, `min_cosine` and `mean_cosine` of vectors, float32, texts × dimensions.

    Raises:
        ValueError: they are not of the same shape.
    """
    found = measure(vectors, references)
    return {name: getattr(found, name) for name in ("max_abs_error", "min_cosine", "mean_cosine")}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a system over a load.

    Attributes:
        seconds: from the texts to the last vector; of a load that is sampled, of one request.
        max_abs_error, min_cosine, mean_cosine: of the vectors that have references, against these; NaN if none has.
        fetched: until the clients had fetched all vectors (seconds).
        latencies: of the requests (seconds).
    """

    seconds: float
    tokens: int
    max_abs_error: float = nan
    min_cosine: float = nan
    mean_cosine: float = nan
    fetched: float = nan
    latencies: Sequence[float] = ()

    def to_json(self) -> dict[str, Any]:
        """The value of a session's step."""
        return asdict(self)


@dataclass(slots=True)
class SystemRuns:
    """One system on one model, and its runs.

    Attributes:
        name: the name of its :class:`~embedctl_bench.peers.registry.System`.
        precision: what it promises.
        computes: the precision of its products, read back from the loaded system; empty if that is not known.
        setting: the setting that it chose, for people.
        tried: the settings that it chose from, with their seconds or errors.
        versions: of its packages.
        unavailable: why there are no runs, or no more.
        loads: the runs by load.
        rounds: those of one load.
    """

    name: str
    label: str
    precision: str
    ours: bool
    computes: str = ""
    setting: str = ""
    tried: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    unavailable: str = ""
    loads: dict[str, Rounds[Run]] = field(default_factory=dict)
    rounds: Rounds[Run] = field(default_factory=Rounds)

    @classmethod
    def of(cls, system: System) -> Self:
        """No runs yet."""
        return cls(system.name, system.label, system.precision, system.ours)

    def on(self, load: str) -> Self:
        """With the runs of one load."""
        return replace(self, rounds=self.loads.get(load, Rounds()))

    def read_back(self, computes: str) -> None:
        """Take over what it computes in: a system at its default promises that, and fp32 if it is not known."""
        self.computes = computes
        if self.precision == AT_ITS_DEFAULT:
            self.precision = _PROMISED.get(computes.partition(" ")[0], "fp32")

    @property
    def runs(self) -> Sequence[Run]:
        """The runs of the rounds that count."""
        return self.rounds.counted

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(run.seconds for run in self.runs)

    def ratios(self, other: SystemRuns) -> list[float]:
        """Its rate as a multiple of the other's, for each round in which both ran."""
        return ratios(other.rounds.each(_duration), self.rounds.each(_duration))

    def times(self, other: SystemRuns) -> float:
        """The median of :meth:`ratios`."""
        return statistics.median(self.ratios(other))

    def flaw(self, tokens: int) -> str:
        """Why it can't be compared with a system that encodes this number of tokens; empty if it can."""
        if self.runs[0].tokens < (1 - _MOST_TOKENS_LOST) * tokens:
            return f"encodes {self.runs[0].tokens:,} tokens of {tokens:,}: it cuts texts"
        errors = [run.max_abs_error for run in self.runs]
        if self.precision == "fp32" and not all(error <= THRESHOLDS["fp32"].max_abs_error for error in errors):
            return f"not fp32: max abs error {max(errors):.1e}"
        if not all(map(math.isfinite, errors)):
            return "its vectors hold NaN"
        cosine = min(run.min_cosine for run in self.runs)
        if self.precision == "fp16" and cosine < THRESHOLDS["fp16"].min_cosine:
            return f"not as accurate as 16 bits: min cosine {cosine:.6f}"
        return ""

    def facts(self) -> dict[str, object]:
        """Its line in a table of systems."""
        tried = [
            f"{each['setting']} " + (f"{each['seconds']:.2f} s" if "seconds" in each else f"fails ({each['error']})")
            for each in self.tried
        ]
        return {
            "system": self.label,
            "setting": self.setting,
            "versions": ", ".join(map(" ".join, self.versions.items())),
            "tried": "; ".join(tried) if len(tried) > 1 else "",
        }


def by_promise(systems: Sequence[SystemRuns]) -> list[SystemRuns]:
    """In the order of precisions, most accurate first; else in the given order."""
    return sorted(systems, key=lambda each: PRECISIONS.index(each.precision))


def _duration(run: Run) -> float:
    return run.seconds


@dataclass(slots=True)
class Comparison:
    """Several systems on one model and one load.

    Attributes:
        where: the model and the load, for people.
        texts, requests: of the load.
        systems: those that were to be measured.
        floors: the runs of each precision's floor, which is compared with the systems of that precision and ranked with
            none.
    """

    where: str
    texts: int
    requests: int = 1
    systems: list[SystemRuns] = field(default_factory=list)
    floors: list[SystemRuns] = field(default_factory=list)

    @property
    def measured(self) -> list[SystemRuns]:
        """The systems with runs, the fastest first."""
        return sorted((each for each in self.systems if each.runs), key=lambda each: each.seconds)

    @property
    def tokens(self) -> int:
        """Tokens of all texts, as our systems count them; if none of them ran, the largest count of the others."""
        counts: list[tuple[bool, int]] = [(each.ours, each.runs[0].tokens) for each in self.measured]
        return max(counts, default=(False, 0))[1]

    @property
    def baseline(self) -> SystemRuns | None:
        """sentence-transformers on torch, if it ran: the peer, else that of our own environment."""
        return self.find(BASELINE) or self.find(SENTENCE_TRANSFORMERS.name)

    def find(self, name: str) -> SystemRuns | None:
        """The system of that name, if it has runs."""
        return next((each for each in self.measured if each.name == name), None)

    def floor(self, precision: str) -> SystemRuns | None:
        """The floor of a precision, if it ran."""
        return next((each for each in self.floors if each.runs and each.precision == precision), None)

    def comparable(self, precision: str, *, ours: bool) -> list[SystemRuns]:
        """The systems of a precision that have no flaw, the fastest first."""
        return [
            each
            for each in self.measured
            if each.ours == ours and each.precision == precision and not each.flaw(self.tokens)
        ]

    def ranked(self, precision: str) -> list[SystemRuns]:
        """The systems of a precision with runs: those without a flaw first, the fastest first."""
        found = [each for each in self.measured if each.precision == precision]
        return sorted(found, key=lambda each: bool(each.flaw(self.tokens)))

    def pairs(self) -> list[tuple[SystemRuns, SystemRuns]]:
        """For each precision, our fastest system, and the other system that is fastest in relation to it."""
        found = []
        for precision in dict.fromkeys(each.precision for each in self.systems if each.ours and each.runs):
            ours, others = (self.comparable(precision, ours=whose) for whose in (True, False))
            if ours and others:
                found.append((ours[0], max(others, key=lambda each: each.times(ours[0]))))
        return found

    def row(
        self, each: SystemRuns, price: float | None = None, baseline: SystemRuns | None = None
    ) -> dict[str, object]:
        """A system's line in a table: its rate, its ratios, its latencies and its accuracy, the worst of its runs.

        Args:
            baseline: what ratios are relative to; None for sentence-transformers on torch in fp32.
        """
        seconds, durations = each.seconds, [run.seconds for run in each.runs]
        flaw, floor, base = each.flaw(self.tokens), self.floor(each.precision), baseline or self.baseline
        ours = self.comparable(each.precision, ours=True)
        ahead = not each.ours and not flaw and bool(ours) and all(each.times(other) > 1 for other in ours)
        times = each.ratios(base) if base else []
        several = len(durations) > 1
        return {
            "system": each.label,
            "promise": PROMISES[each.precision],
            "computes": each.computes or None,
            "setting": each.setting,
            "seconds": seconds,
            "spread_percent": 100 * spread(durations) if several else None,
            "texts_per_s": self.texts / seconds,
            "requests_per_s": self.requests / seconds,
            "tokens_per_s": each.runs[0].tokens / seconds,
            "times": statistics.median(times) if times else None,
            "least_times": min(times, default=None),
            "most_times": max(times, default=None),
            "share_of_floor": each.times(floor) if floor and each.ratios(floor) else None,
            **percentiles([latency for run in each.runs for latency in run.latencies]),
            "fetched_s": statistics.median(run.fetched for run in each.runs),
            "max_abs_error": _error(max(run.max_abs_error for run in each.runs)),
            "min_cosine": min(run.min_cosine for run in each.runs),
            "mean_cosine": min(run.mean_cosine for run in each.runs),
            "cost_per_million": None if price is None else cost_per_million(self.texts / seconds, price),
            "remark": "; ".join(filter(None, [flaw, "ahead of ours" if ahead else "", each.unavailable])),
            "_bold": ahead,
            "_noisy": several and is_noisy(durations),
        }

    def lead_claims(self) -> Iterator[Claim]:
        """For each precision, that no other system was faster than ours."""
        for ours, other in self.pairs():
            lead = ours.times(other)
            yield Claim(
                what=f"no other system that was measured is faster in {PROMISES[ours.precision]} ({self.where})",
                published="–",
                ours=f"{ours.label} has {lead:.2f} × the rate of {other.label}, the fastest of them",
                met=lead >= 1,
                why="" if lead >= 1 else UNKNOWN,
            )

    def beside(self, name: str) -> Table:
        """Each of ours beside each other system, whatever the precision of either."""
        ours = [each for each in self.measured if each.ours]
        columns = [
            Column("system", "× the rate of"),
            Column("promise", "promises"),
            *(Column(each.name, each.label) for each in ours),
        ]
        rows = [
            {
                "system": other.label,
                "promise": PROMISES[other.precision],
                **{each.name: in_words(each.ratios(other)) for each in ours},
            }
            for other in by_promise([each for each in self.measured if not each.ours])
        ]
        note = (
            "Median of the rounds in which both ran (least–most). Systems that promise less stand beside those of more."
        )
        return Table(name, f"{self.where}: ours, × each other system", columns, rows, note)

    def unavailable(self) -> Iterator[str]:
        """Why systems have no runs, or no more."""
        for each in [*self.floors, *self.systems]:
            if each.unavailable:
                yield f"{self.where}: {each.label}: not available: {each.unavailable}"

    def without_baseline(self) -> Iterator[str]:
        """That there are no ratios to sentence-transformers, if it did not run."""
        if self.measured and self.baseline is None:
            yield f"{self.where}: sentence-transformers on torch was not measured, so there are no ratios to it."


def in_words(values: Sequence[float]) -> str | None:
    """The median, the least and the most of ratios."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else None


def _error(value: float) -> str | None:
    return None if math.isnan(value) else f"{value:.1e}"
