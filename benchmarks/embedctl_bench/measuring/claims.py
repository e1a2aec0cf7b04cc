"""What a report claims, and shows in words, of systems that took turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from embedctl_bench.measuring.comparison import PROMISES, Comparison, S
from embedctl_bench.report.report import Claim

#: Why a system is not met or ahead, if that is unknown.
UNKNOWN = "the run does not tell why"


def lead_claims(comparison: Comparison[S], where: str) -> Iterator[Claim]:
    """For each precision, that no other system was faster than ours."""
    for ours, other in comparison.pairs():
        lead = ours.times(other)
        yield Claim(
            what=f"no other system that was measured is faster in {PROMISES[ours.precision]} ({where})",
            published="–",
            ours=f"{ours.label} has {lead:.2f} × the rate of {other.label}, the fastest of them",
            met=lead >= 1,
            why="" if lead >= 1 else UNKNOWN,
        )


def trial(tried: Mapping[str, object]) -> str:
    """A setting that was tried on a sample, with its seconds or its error."""
    return f"{tried['setting']} " + (f"{tried['seconds']:.2f} s" if "seconds" in tried else f"fails ({tried['error']})")
