"""The report of the accuracy gate: its checks, as a table for people and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from embedctl_config.hardware import Thresholds
from embedctl_workers.accuracy.ranking import Agreement
from embedctl_workers.arrays.distance import Measured
from embedctl_workers.tables import table

#: Number of texts that are encoded alone and in chosen batches: too few for a meaningful mean cosine.
FEW = 6


@dataclass(frozen=True, slots=True)
class Check:
    """One way to encode the texts, with its result and its bounds."""

    name: str
    texts: int  #: their number; for a few, the mean cosine is not meaningful and has no bound
    measured: Measured
    bounds: Thresholds
    length_bound: float  #: the bound of `measured.length_error`
    normalized: bool  #: whether that error is the distance from length 1
    worst: str  #: the name of the text that differs most
    failures: Mapping[str, str]  #: text → why it has no vector

    @property
    def passed(self) -> bool:
        """Whether every text has a vector, and all figures are within their bounds."""
        return not self.failures and self.measured.within(self.bounds, self.length_bound)

    def as_row(self) -> tuple[str, ...]:
        found = self.measured
        length = f"{found.length_error:.1e}"
        return (
            self.name,
            str(self.texts),
            f"{found.max_abs_error:.1e}",
            f"{found.min_cosine:.6f}",
            f"{found.mean_cosine:.6f}" if self.texts > FEW + 1 else "",
            length if self.normalized else "",
            "" if self.normalized else length,
            self.worst,
            "ok" if self.passed else "FAILED",
        )


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one model as one class runs it, against torch in fp32.

    The first check encodes in the batches that a chunk would be cut into. The second compares raw vectors. Below fp32,
    there are the rankings by sparse vectors and multi-vectors, too.
    """

    title: str
    bounds: Thresholds
    overrides: str
    checks: Sequence[Check]
    rankings: Sequence[Agreement] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks) and all(each.passed for each in self.rankings)

    @property
    def figures(self) -> str:
        """The first check's figures, in one line."""
        found = self.checks[0].measured
        return f"max abs {found.max_abs_error:.1e}, cosine min {found.min_cosine:.6f} mean {found.mean_cosine:.6f}"

    def as_json(self) -> dict[str, object]:
        """The whole report, for programs; null stands for a figure that is not finite, or for no bound."""
        return {
            "title": self.title,
            "passed": self.passed,
            "bounds": _finite(self.bounds),
            "overrides": self.overrides,
            "checks": [
                {
                    "name": check.name,
                    "texts": check.texts,
                    "passed": check.passed,
                    **_finite(check.measured),
                    "length_bound": check.length_bound,
                    "normalized": check.normalized,
                    "worst": check.worst,
                    "failures": dict(check.failures),
                }
                for check in self.checks
            ],
            "rankings": [{**asdict(each), "passed": each.passed} for each in self.rankings],
        }

    def __str__(self) -> str:
        bounds = self.bounds
        rows = [
            ("check", "texts", "max abs", "min cosine", "mean cosine", "unit length", "raw length", "worst text", ""),
            (
                "bound",
                "",
                f"{bounds.max_abs_error:.1e}" if math.isfinite(bounds.max_abs_error) else "",
                f"{bounds.min_cosine:.6f}" if bounds.min_cosine > -1 else "",
                f"{bounds.mean_cosine:.6f}" if bounds.mean_cosine > -1 else "",
                *(f"{check.length_bound:.1e}" for check in self.checks[:2]),
                "",
                "",
            ),
            *(check.as_row() for check in self.checks),
        ]
        lines = table(rows, figures=range(1, 7))
        lost = [f"{check.name}: text {name!r}: {why}" for check in self.checks for name, why in check.failures.items()]
        own = [f"bounds set by the class: {self.overrides}"] if self.overrides else []
        return "\n".join([self.title, *lines, *map(str, self.rankings), *lost, *own])


def _finite(figures: Measured | Thresholds) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(figures).items()}
