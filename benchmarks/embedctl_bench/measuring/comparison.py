"""Runs of several systems over the same texts: which can be compared, and which is ahead."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Self, TypeVar

from embedctl_bench.measuring.sampling import Rounds, ratios
from embedctl_bench.peers.registry import AT_ITS_DEFAULT, System
from embedctl_config.hardware import PRECISIONS, THRESHOLDS

#: A system that encodes fewer tokens than ours by more than this share truncates texts.
_MOST_TOKENS_LOST = 0.005
#: What a report calls each precision that is promised.
PROMISES = {"fp32": "fp32", "fp16": "16 bits (bf16 or fp16)", "int8": "int8"}
#: What a system computes in → the precision that it promises.
_PROMISED = {"fp32": "fp32", "bf16": "fp16", "fp16": "fp16", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a system over its texts.

    Attributes:
        seconds: from the texts to the last vector.
        max_abs_error, min_cosine, mean_cosine: of the vectors that have references, against these; NaN if the system
            makes no vectors.
    """

    seconds: float
    tokens: int
    max_abs_error: float
    min_cosine: float
    mean_cosine: float

    def to_json(self) -> dict[str, Any]:
        """The value of a session's step."""
        return asdict(self)

    @classmethod
    def of_json(cls, facts: Mapping[str, Any]) -> Self:
        """The run of a session's step."""
        return cls(**facts)


R = TypeVar("R", bound=Run)


@dataclass(slots=True)
class SystemRuns(Generic[R]):
    """The runs of one system on one model.

    Attributes:
        name: the name of its :class:`~embedctl_bench.peers.registry.System`.
        precision: what it promises.
        computes: the precision of its products, read back from the loaded system; empty if that is not known.
        setting: the setting that it chose, for people.
        tried: the settings that it chose from, with their seconds or errors.
        versions: of its packages.
        unavailable: why there are no runs, or no more.
    """

    name: str
    label: str
    precision: str
    ours: bool
    computes: str = ""
    setting: str = ""
    tried: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    rounds: Rounds[R] = field(default_factory=Rounds)
    unavailable: str = ""

    @classmethod
    def of(cls, system: System) -> Self:
        """No runs yet."""
        return cls(system.name, system.label, system.precision, system.ours)

    def read_back(self, computes: str) -> None:
        """Take over what it computes in: a system at its default promises that, and fp32 if it is not known."""
        self.computes = computes
        if self.precision == AT_ITS_DEFAULT:
            self.precision = _PROMISED.get(computes.partition(" ")[0], "fp32")

    @property
    def runs(self) -> Sequence[R]:
        """The runs of the rounds that count."""
        return self.rounds.counted

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(run.seconds for run in self.runs)

    def ratios(self, other: SystemRuns[R]) -> list[float]:
        """Its rate as a multiple of the other's, for each round in which both ran."""
        return ratios(other.rounds.each(_duration), self.rounds.each(_duration))

    def times(self, other: SystemRuns[R]) -> float:
        """The median of :meth:`ratios`."""
        return statistics.median(self.ratios(other))

    def figures(self, *more: R) -> dict[str, object]:
        """The worst accuracy of its runs and of these, for a table."""
        runs = [*self.runs, *more]
        return {
            "max_abs_error": f"{max(run.max_abs_error for run in runs):.1e}",
            "min_cosine": min(run.min_cosine for run in runs),
            "mean_cosine": min(run.mean_cosine for run in runs),
        }

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


S = TypeVar("S", bound=SystemRuns[Any])


def by_promise(systems: Sequence[S]) -> list[S]:
    """In the order of precisions, most accurate first; else in the given order."""
    return sorted(systems, key=lambda each: PRECISIONS.index(each.precision))


def _duration(run: Run) -> float:
    return run.seconds


class Comparison(Generic[S]):
    """Several systems on one model.

    Attributes:
        systems: those that were to be measured.
    """

    __slots__ = ()
    systems: list[S]

    @property
    def measured(self) -> list[S]:
        """The systems with runs, the fastest first."""
        return sorted((each for each in self.systems if each.runs), key=lambda each: each.seconds)

    @property
    def tokens(self) -> int:
        """Tokens of all texts, as our systems count them; if none of them ran, the largest count of the others."""
        counts: list[tuple[bool, int]] = [(each.ours, each.runs[0].tokens) for each in self.measured]
        return max(counts, default=(False, 0))[1]

    def find(self, name: str) -> S | None:
        """The system of that name, if it has runs."""
        return next((each for each in self.measured if each.name == name), None)

    def comparable(self, precision: str, *, ours: bool) -> list[S]:
        """The systems of a precision that have no flaw, the fastest first."""
        return [
            each
            for each in self.measured
            if each.ours == ours and each.precision == precision and not each.flaw(self.tokens)
        ]

    def pairs(self) -> list[tuple[S, S]]:
        """For each precision, our fastest system, and the other system that is fastest in relation to it."""
        found = []
        for precision in dict.fromkeys(each.precision for each in self.systems if each.ours and each.runs):
            ours, others = (self.comparable(precision, ours=whose) for whose in (True, False))
            if ours and others:
                found.append((ours[0], max(others, key=lambda each: each.times(ours[0]))))
        return found
