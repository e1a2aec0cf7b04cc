"""The GPU benchmark's report, as Markdown."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from benchmarks.ours.gpu_models import is_random

from embedctl_bench.engines.workloads import describe_workload
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.workload import Workload
from embedctl_config.cpu import cpu_name

OURS, BF16, FP32, MATRIX = "embedctl", "st-bf16", "st-fp32", "matrix"
#: The aims: ratio to sentence-transformers in bf16, share of the matrix rate for bge-large, idle time.
AIM_RATIO, AIM_SHARE, AIM_IDLE = 1.5, 0.5, 0.05
_HEADINGS = (
    "system", "setting", "sentences/s (min–max)", "tokens/s", "× ST bf16 (min–max)", "× ST fp32 (min–max)",
    "share of the matrix rate", "max abs error", "min cosine", "mean cosine",
)  # fmt: skip


@dataclass(slots=True)
class GpuRounds:
    """The rounds of one system on one model and workload. `unavailable` says why there are none."""

    name: str
    setting: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    texts_per_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    errors: tuple[float, float, float] | None = None
    unavailable: str = ""

    def add(self, texts_per_s: float, tokens_per_s: float) -> None:
        """Note a round."""
        self.texts_per_s.append(texts_per_s)
        self.tokens_per_s.append(tokens_per_s)

    def compare(self, vectors: np.ndarray, reference: np.ndarray) -> None:
        """Note the largest difference of a component of unit vectors, and the least and the mean cosine."""
        if vectors.shape != reference.shape:
            raise ValueError(f"vectors of shape {vectors.shape} can't be compared with {reference.shape}")
        a, b = (each / np.linalg.norm(each.astype(np.float64), axis=1, keepdims=True) for each in (vectors, reference))
        cosines = (a * b).sum(axis=1)
        self.errors = float(np.abs(a - b).max()), float(cosines.min()), float(cosines.mean())


@dataclass(slots=True)
class GpuComparison:
    """All systems on one model and workload. A trial does not run on a GPU, and has no aims."""

    model: Model
    workload: Workload
    trial: bool = False
    results: dict[str, GpuRounds] = field(default_factory=dict)
    idle: float = math.nan
    idle_by: str = ""
    began: float = field(default_factory=time.time)

    def render(self) -> Iterator[str]:
        """A table, and the aims."""
        weights = "random weights of that shape" if is_random(self.model) else "its real weights"
        yield f"## {self.workload.name}, {self.model.name}\n"
        yield (
            f"{describe_workload(self.workload)}. {self.model.layers} layers of {self.model.hidden}, {weights}. "
            f"Began {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(self.began))}.\n"
        )
        yield "| " + " | ".join(_HEADINGS) + " |"
        yield "|" + " --- |" * len(_HEADINGS)
        for name in (OURS, BF16, FP32):
            if name in self.results:
                yield "| " + " | ".join(self._cells(self.results[name])) + " |"
        yield ""
        yield f"Idle while the queue was full: {_percent(self.idle)}" + (f" ({self.idle_by})." if self.idle_by else ".")
        if not self.trial:
            yield from self._aims()
        yield ""
        for result in self.results.values():
            if result.unavailable:
                yield f"- {result.name}: not available: {result.unavailable}"
        yield ""

    def _cells(self, result: GpuRounds) -> Iterator[str]:
        yield result.name
        yield result.setting
        yield _spread(result.texts_per_s, ",.0f")
        yield f"{median(result.tokens_per_s):,.0f}" if result.tokens_per_s else "–"
        for other in (BF16, FP32):
            yield "1" if other == result.name else _spread(self._ratios(result.name, other), ".2f")
        yield _spread(self._ratios(result.name, MATRIX), ".3f")
        worst, least, mean = result.errors or (math.nan,) * 3
        yield "–" if math.isnan(worst) else f"{worst:.1e}"
        yield "–" if math.isnan(least) else f"{least:.6f}"
        yield "–" if math.isnan(mean) else f"{mean:.6f}"

    def _ratios(self, name: str, other: str) -> list[float]:
        """The ratio of each round. For the matrix products, a text counts as its operations alone."""
        found = [self.results[each].texts_per_s if each in self.results else [] for each in (name, other)]
        return [a / b for a, b in zip(*found, strict=False)]

    def _aims(self) -> Iterator[str]:
        ratios, shares = self._ratios(OURS, BF16), self._ratios(OURS, MATRIX)
        aims = [(f"{AIM_RATIO} × sentence-transformers in bf16", ratios and median(ratios) >= AIM_RATIO)]
        if self.model.name == "bge-large":
            aims.append((f"{AIM_SHARE} of the matrix rate", shares and median(shares) >= AIM_SHARE))
        aims.append((f"idle below {AIM_IDLE:.0%}", self.idle < AIM_IDLE))
        yield "Aims: " + "; ".join(f"{aim}: {'met' if met else '**not met**'}" for aim, met in aims) + "."


def render(comparisons: Sequence[GpuComparison], device: str, cpus: Sequence[int]) -> str:
    """The whole report."""
    lines = [
        "# The whole pipeline beside sentence-transformers\n",
        f"{device}; {len(cpus)} CPUs of {os.cpu_count()}, {cpu_name()}; Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}; {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}.\n",
        "Rates are medians of the rounds; ratios are of the rates of one round. embedctl is timed from the first claim "
        "to the last vector stored, sentence-transformers from texts to float32 vectors in memory, with tokenising. "
        "The share is of the operations of the model for these tokens, without padding, at the measured matrix rate. "
        "Errors are against sentence-transformers in fp32.\n",
    ]
    for comparison in comparisons:
        lines += comparison.render()
    versions = {
        package: version
        for comparison in comparisons
        for result in comparison.results.values()
        for package, version in result.versions.items()
    }
    lines.append("Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}}–{max(values):{form}})" if values else "–"


def _percent(share: float) -> str:
    return "not measured" if math.isnan(share) else f"{share:.1%}"
