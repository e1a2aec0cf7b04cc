"""The report of `embedctl bench engines`: who is ranked and who is not, and how far from the floor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from embedctl_bench.asking import Asked
from embedctl_bench.measuring.comparison import (
    ACCURACY,
    COST,
    FLOOR_SHARE,
    PROMISES,
    REMARK,
    SECONDS,
    SYSTEM,
    SYSTEMS,
    TIMES,
    TOKENS,
    Comparison,
    SystemRuns,
    by_promise,
    in_words,
)
from embedctl_bench.measuring.sampling import RATIOS
from embedctl_bench.peers.models import Model, slug
from embedctl_bench.peers.registry import FLOORS, GPU_FLOOR
from embedctl_bench.peers.workload import Workload
from embedctl_bench.report.report import Claim, Column, Report, Table
from embedctl_bench.texts.workloads import describe_workload

#: The whole product overlaps tokenising with encoding. A larger multiple of its engine's rate is a fault of the run.
_MOST_SHARE = 1.1
_FLOORS = {each.name for each in (*FLOORS.values(), GPU_FLOOR)}
#: The aims on a GPU: × sentence-transformers in 16 bits, share of the matrix rate for a large model, and idle time.
AIM_RATIO, AIM_SHARE, AIM_IDLE, _LARGE = 1.5, 0.5, 0.05, 1024
_SPREAD = Column("spread_percent", "spread", "%", 0)
_FLOOR_COLUMNS = (
    Column("precision", "products in"),
    Column("setting", "setting"),
    SECONDS,
    _SPREAD,
    TOKENS,
    Column("gflops", "GFLOPS", "", 0),
    Column("times_fp32", "× fp32's", "", 2),
)


def _columns(price: float | None) -> list[Column]:
    return [
        Column("rank", "rank"),
        SYSTEM,
        Column("computes", "as loaded"),
        Column("setting", "setting"),
        SECONDS,
        _SPREAD,
        Column("texts_per_s", "sentences", "1/s", 0),
        TOKENS,
        TIMES,
        Column("least_times", "least", "×", 2),
        Column("most_times", "most", "×", 2),
        FLOOR_SHARE,
        *ACCURACY,
        REMARK,
        *([] if price is None else [COST]),
    ]


@dataclass(slots=True)
class EnginesResult:
    """All systems on one model and workload.

    Attributes:
        name: the model as the command line has it.
        shown: the model in words.
        rounds: planned rounds.
        uninstalled: names of the systems that were left out because they are not installed.
        runs: of the floors and the systems.
        idle: of each of our products on a GPU, the share of time during which the GPU was idle, and what says so.
    """

    name: str
    shown: str
    model: Model
    workload: Workload
    rounds: int
    uninstalled: Sequence[str] = ()
    runs: list[SystemRuns] = field(default_factory=list)
    idle: dict[str, Any] = field(default_factory=dict)

    @property
    def comparison(self) -> Comparison:
        """What was measured so far."""
        runs = [each.on(self.workload.name) for each in self.runs]
        where = f"{self.name}, {self.workload.name}"
        systems = [each for each in runs if each.name not in _FLOORS]
        floors = [each for each in runs if each.name in _FLOORS]
        return Comparison(where, len(self.workload.lengths), 1, systems, floors)


def report(found: Sequence[EnginesResult], asked: Asked) -> Report:
    """The whole report."""
    measured = [(result, result.comparison) for result in found if result.comparison.measured]
    return Report(
        name="engines",
        title="Embedding engines, side by side",
        command=asked.command,
        workload=" ".join(_workload(found)),
        machine=asked.machine(),
        tables=[table for result, comparison in measured for table in _tables(result, comparison, asked.price)],
        claims=[
            claim
            for result, comparison in measured
            for claim in (*comparison.lead_claims(), *(_aims(result, comparison) if asked.device == "gpu" else ()))
        ],
        notes=[*(note for result in found for note in _statements(result, result.comparison)), *_notes(found)],
    )


def _workload(found: Sequence[EnginesResult]) -> Iterator[str]:
    yield (
        "Paragraphs of Python's own docstrings, the same texts for every system. W1 has lengths as in real corpora; W2 "
        "has long texts. On CPUs, a model larger than all-MiniLM-L6-v2 gets fewer texts in proportion."
    )
    for result in found:
        yield f"{result.shown}, {describe_workload(result.workload)}, {result.rounds} rounds."
        limit, lengths = result.model.max_tokens, result.workload.lengths
        if cut := sum(length > limit for length in lengths):
            yield f"{result.name} takes {limit} tokens: {cut} of {len(lengths)} texts are cut."


def _tables(result: EnginesResult, comparison: Comparison, price: float | None) -> Iterator[Table]:
    name = f"{slug(result.name)}-{result.workload.name}"
    for precision in dict.fromkeys(each.precision for each in by_promise(comparison.measured)):
        rows = []
        for rank, each in enumerate(comparison.ranked(precision), start=1):
            flaw = each.flaw(comparison.tokens)
            row = {**comparison.row(each, price), "rank": None if flaw else rank}
            rows.append({**row, "remark": f"not ranked: {row['remark']}" if flaw else row["remark"]})
        yield Table(
            f"{name}-{precision}",
            f"{comparison.where}: {PROMISES[precision]}",
            _columns(price),
            rows,
            "Bold: faster than every one of ours of its precision. ST is sentence-transformers; least and most are "
            "those of the rounds. As loaded: the precision that was read back from the loaded system, or our engine. "
            "Accuracy is against ST on torch in fp32. The floor is that of the precision.",
        )
    if any(each.ours for each in comparison.measured):
        yield comparison.beside(f"{name}-beside")
    if floors := [each for each in comparison.floors if each.runs]:
        yield Table(
            f"{name}-floors",
            f"{comparison.where}: the products alone",
            _FLOOR_COLUMNS,
            [_floor_row(result, comparison, each) for each in floors],
            "The model's matrix products of these tokens, without padding; on CPUs without attention, by the fastest "
            "product of torch in each precision.",
        )
    yield Table(
        f"{name}-systems",
        f"{comparison.where}: settings and versions",
        SYSTEMS,
        [each.facts() for each in [*floors, *comparison.measured]],
        "A setting is processes × threads, and options.",
    )


def _floor_row(result: EnginesResult, comparison: Comparison, each: SystemRuns) -> dict[str, object]:
    base, tokens = comparison.floor("fp32"), result.workload.tokens
    return {
        **comparison.row(each, baseline=base or each),
        "precision": each.computes or each.label,
        "tokens_per_s": tokens / each.seconds,
        "gflops": result.model.flops_per_token * tokens / each.seconds / 1e9,
        "times_fp32": median(ratios) if base and (ratios := each.ratios(base)) else None,
        "_bold": False,
    }


def _shares(comparison: Comparison) -> Iterator[tuple[str, list[float]]]:
    """For each class, the whole product's rate as a multiple of its engine's in each round."""
    for product in comparison.measured:
        engine = comparison.find(product.name.replace("embedctl-", "embedctl-engine-", 1))
        if product.ours and engine and (shares := product.ratios(engine)):
            yield product.label, shares


def _aims(result: EnginesResult, comparison: Comparison) -> Iterator[Claim]:
    """What the product is to reach on a GPU."""
    other, floor = comparison.find("sentence-transformers-bf16"), comparison.floor("fp16")
    for each in comparison.measured:
        if not each.ours or each.name.startswith("embedctl-engine"):
            continue
        what = f"{each.label}, {comparison.where}"
        if other and (ratios := each.ratios(other)):
            met = median(ratios) >= AIM_RATIO
            yield Claim(f"{what}: × sentence-transformers in bf16", f"aim: {AIM_RATIO}", f"{median(ratios):.2f}", met)
        if floor and result.model.hidden >= _LARGE and (shares := each.ratios(floor)):
            met = median(shares) >= AIM_SHARE
            yield Claim(f"{what}: share of the matrix rate", f"aim: {AIM_SHARE}", f"{median(shares):.2f}", met)
        idle, _ = result.idle.get(each.label, (None, ""))
        if idle is not None:
            yield Claim(f"{what}: idle time of the GPU", f"aim: < {AIM_IDLE:.0%}", f"{idle:.1%}", idle < AIM_IDLE)


def _statements(result: EnginesResult, comparison: Comparison) -> Iterator[str]:
    for label, shares in _shares(comparison):
        yield f"{comparison.where}: {label} has {in_words(shares)} × the rate of its engine called directly."
        if median(shares) > _MOST_SHARE:
            yield (
                f"**Not to be trusted: {comparison.where}**, because the whole product can't be faster than its own "
                "engine."
            )
    for label, (idle, what) in result.idle.items():
        told = "not measured" if idle is None else f"{idle:.1%}"
        yield f"{comparison.where}: {label}: idle while the queue was full: {told} ({what})."
    yield from comparison.without_baseline()
    yield from comparison.unavailable()


def _notes(found: Sequence[EnginesResult]) -> Iterator[str]:
    yield (
        "Medians of the rounds, systems by turns. No round is repeated; a figure is marked noisy if its rounds differ "
        f"by more than 10 %. {RATIOS} A time is from the texts to their float32 vectors, tokenising included; for the "
        "whole product, from its first claim to the last vector stored."
    )
    tuned = any(len(each.tried) > 1 for result in found for each in result.runs)
    yield (
        "Each system chose the fastest of its settings on a sample, and encoded all texts once before the rounds."
        if tuned
        else "No setting was tried: each system ran at its first one, and encoded all texts once before the rounds."
    )
    yield (
        "A system is not ranked if it encodes fewer tokens than ours, if it promises fp32 and a component of a vector "
        "differs by more than 1e-4 from sentence-transformers on torch in fp32, one text at a time, or if it promises "
        "16 bits and a cosine to these vectors is below 0.999. A system at its default promises what it computes in."
    )
    if uninstalled := list(dict.fromkeys(name for result in found for name in result.uninstalled)):
        yield f"Not installed, and so not measured: {', '.join(uninstalled)} (`--peers` installs them)."
