"""What was measured, as Markdown: who is ranked and who is not, and on what it all ran."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from benchmarks.ours.peers_models import MODELS
from benchmarks.ours.workloads import describe

from embedctl_bench.measuring.shapes import describe as describe_model
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import BASELINE, ENGINE, FLOOR, PIPELINE, System
from embedctl_bench.peers.workload import Workload
from embedctl_workers.machine.cpu import cpu_flags, cpu_name

#: What fp32 promises; and how many fewer tokens than ours a system may encode before it counts as cutting texts.
MOST_ERROR, LEAST_COSINE = 1e-4, 0.999
MOST_TOKENS_LOST = 0.005
#: A pipeline overlaps tokenising with encoding; what is above this is no gain but a fault of the measurement.
MOST_SHARE = 1.1
_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile")
_HEADINGS = (
    "rank", "system", "setting", "seconds", "sentences/s", "tokens/s", "× ST torch (min–max)", "share of floor",
    "max abs error", "min cosine", "mean cosine",
)  # fmt: skip


@dataclass(slots=True)
class Result:
    """One system on one model and workload. `unavailable` says why there are no runs, or no more of them."""

    system: System
    setting: str = ""
    tried: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    max_error: float = 0.0
    cosines: tuple[float, float] = (1.0, 1.0)
    unavailable: str = ""

    def compare(self, vectors: np.ndarray, reference: np.ndarray) -> None:
        """Note the largest difference from the reference, and the least and mean cosine with it."""
        if vectors.shape != reference.shape or not np.isfinite(vectors).all():
            self.max_error, self.cosines = float("inf"), (0.0, 0.0)
            return
        cosines = np.einsum("ij,ij->i", vectors, reference, dtype=np.float64)
        cosines /= np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
        self.max_error = max(self.max_error, float(np.abs(vectors - reference).max()))
        self.cosines = (float(cosines.min()), float(cosines.mean()))

    def unranked(self, tokens: int) -> str:
        """Why it has no rank beside a system that encoded this many tokens; empty if it has one."""
        if self.tokens < (1 - MOST_TOKENS_LOST) * tokens:
            return f"encodes {self.tokens:,} tokens of {tokens:,}: it cuts texts"
        if self.system.precision == "fp32" and (self.max_error > MOST_ERROR or self.cosines[0] < LEAST_COSINE):
            return f"not fp32: max abs error {self.max_error:.1e}, min cosine {self.cosines[0]:.4f}"
        if not np.isfinite(self.max_error):
            return "vectors with NaN, or too few"
        return ""


@dataclass(slots=True)
class Comparison:
    """All systems on one model and workload; `seconds` of all of them are of the same rounds, in order."""

    model: Model
    workload: Workload
    results: list[Result]
    began: float = field(default_factory=time.time)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    def render(self) -> Iterator[str]:
        """Tables of fp32 and int8, figures, settings tried."""
        by_name = {result.system.name: result for result in self.results if result.seconds}
        tokens = by_name[ENGINE].tokens if ENGINE in by_name else self.workload.tokens
        yield f"## {self.workload.name}, {self.model.name}\n"
        model = describe_model(MODELS[self.model.name])
        yield f"{describe(self.workload)}. {model}. Began {_when(self.began)}, load {self.load:.2f}.\n"
        floor, baseline = by_name.pop(FLOOR, None), by_name.get(BASELINE)
        if floor:
            yield _describe_floor(floor, self.model, self.workload) + "\n"
        for precision in ("fp32", "int8"):
            chosen = [each for each in by_name.values() if each.system.precision == precision]
            if chosen:
                yield f"**{precision}**, median of {max(len(each.seconds) for each in chosen)} rounds\n"
                yield from self._table(chosen, tokens, baseline, floor)
                yield ""
        if ENGINE in by_name and PIPELINE in by_name:
            share = _ratios(by_name[ENGINE], by_name[PIPELINE])
            yield f"Pipeline against the same engine called directly: {_spread(share)} of its rate.\n"
            if median(share) > MOST_SHARE:
                yield "**Not to be trusted**: a pipeline can't beat its own engine; the two don't run alike.\n"
        for result in self.results:
            if result.unavailable:
                yield f"- {result.system.name}: not available: {result.unavailable}"
        yield "\nSettings tried on a sample (seconds):\n"
        for result in self.results:
            if len(result.tried) > 1:
                yield f"- {result.system.name}: " + "; ".join(_trial(each) for each in result.tried)
        yield ""

    def _table(
        self, results: list[Result], tokens: int, baseline: Result | None, floor: Result | None
    ) -> Iterator[str]:
        yield "| " + " | ".join(_HEADINGS) + " |"
        yield "|" + " --- |" * len(_HEADINGS)
        results = sorted(results, key=lambda each: (bool(each.unranked(tokens)), median(each.seconds)))
        for rank, result in enumerate(results, start=1):
            reason, seconds = result.unranked(tokens), median(result.seconds)
            cells = [
                "–" if reason else str(rank),
                result.system.name + (f"; not ranked: {reason}" if reason else ""),
                result.setting,
                f"{seconds:.2f}",
                f"{len(self.workload.lengths) / seconds:,.0f}",
                f"{result.tokens / seconds:,.0f}",
                _spread(_ratios(baseline, result)) if baseline else "",
                f"{median(_ratios(floor, result)):.2f}" if floor else "",
                f"{result.max_error:.1e}",
                f"{result.cosines[0]:.6f}",
                f"{result.cosines[1]:.6f}",
            ]
            yield "| " + " | ".join(cells) + " |"


def _ratios(result: Result, other: Result) -> list[float]:
    """How much faster the other is, round by round; a round that one of them did not end is left out."""
    return [a / b for a, b in zip(result.seconds, other.seconds, strict=False)] or [float("nan")]


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def _trial(tried: Mapping[str, Any]) -> str:
    outcome = f"{tried['seconds']:.2f}" if "seconds" in tried else f"fails ({tried['error']})"
    return f"{tried['setting']} {outcome}"


def _describe_floor(floor: Result, model: Model, workload: Workload) -> str:
    seconds = median(floor.seconds)
    rate = model.flops_per_token * workload.tokens / seconds / 1e9
    return (
        f"Floor, the matrix products alone without padding ({floor.setting}): {seconds:.2f} s, {rate:.0f} GFLOPS, "
        f"{workload.tokens / seconds:,.0f} tokens/s."
    )


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))


def render(comparisons: Sequence[Comparison], cpus: Sequence[int]) -> str:
    """The whole report."""
    known = cpu_flags()
    flags = ", ".join(flag for flag in _FLAGS if flag in known)
    lines = [
        "# CPU embedding engines, side by side\n",
        f"CPUs {','.join(map(str, cpus))} of {os.cpu_count()}, {cpu_name()} ({flags}); Python "
        f"{platform.python_version()}, {platform.system()} {platform.release()}; {_when(time.time())}, load "
        + " ".join(f"{load:.2f}" for load in os.getloadavg())
        + ".\n",
        "A setting is processes × threads, and options; each system chose its own on a sample. Ratios are of times of "
        "one round. Timed: texts to float32 vectors, tokenising included.\n",
    ]
    for comparison in comparisons:
        lines += comparison.render()
    lines.append("Versions:\n")
    versions = {each.system.name: each.versions for every in comparisons for each in every.results if each.versions}
    lines += [f"- {name}: " + ", ".join(f"{a} {b}" for a, b in found.items()) for name, found in versions.items()]
    return "\n".join(lines) + "\n"
