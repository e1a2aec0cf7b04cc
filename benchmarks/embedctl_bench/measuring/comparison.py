"""Runs of several systems over the same texts: which can be compared, which is ahead, and their rows in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from statistics import median
from typing import Any, Self

from embedctl_bench.measuring.sampling import is_noisy, percentiles, spread
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import AT_ITS_DEFAULT, ATTENTION_FLOOR, BASELINE, SENTENCE_TRANSFORMERS, System
from embedctl_bench.peers.tuned import Run
from embedctl_bench.report import Column, Table
from embedctl_config.hardware import PRECISIONS, THRESHOLDS

#: A system that encodes fewer tokens than ours by more than this share truncates texts.
_MOST_TOKENS_LOST = 0.005
#: What a report calls each precision that is promised.
PROMISES = {"fp32": "fp32", "fp16": "16 bits (bf16 or fp16)", "int8": "int8"}
#: What a system computes in → the precision that it promises.
_PROMISED = {"fp32": "fp32", "bf16": "fp16", "fp16": "fp16", "int8": "int8"}

#: Of a row of :meth:`Comparison.rows`.
COLUMNS = (
    Column("system", "system"),
    Column("load", "load"),
    Column("length", "tokens", 0),
    Column("batch", "batch", 0),
    Column("rank", "rank", 0),
    Column("promise", "promises"),
    Column("computes", "as loaded"),
    Column("setting", "setting"),
    Column("seconds", "time (s)", 3),
    Column("spread_percent", "spread (%)", 0),
    Column("texts_per_s", "texts (1/s)", 1),
    Column("requests_per_s", "requests (1/s)", 3),
    Column("tokens_per_s", "tokens (1/s)", 0),
    Column("gflops", "GFLOPS", 0),
    Column("times", "× baseline", 2),
    Column("least_times", "least", 2),
    Column("most_times", "most", 2),
    Column("share_of_floor", "share of floor", 2),
    Column("share_with_attention", "with attention", 2),
    *(Column(f"{each}_ms", f"{each} (ms)", 1) for each in ("p50", "p90", "p99")),
    Column("max_abs_error", "max abs error"),
    Column("min_cosine", "min cosine", 6),
    Column("mean_cosine", "mean cosine", 6),
    Column("idle_percent", "GPU idle (%)", 1),
    Column("remark", "remark"),
)
_SYSTEM_COLUMNS = (
    Column("system", "system"),
    Column("setting", "setting"),
    Column("versions", "versions"),
    Column("tried", "tried on a sample"),
)
_NOTE = (
    "Each precision is ranked alone. × baseline is the rate as a multiple of {base}, with the least and the most of "
    "the rounds. As loaded: the precision that was read back from the loaded system, or our engine. A floor is the "
    "model's matrix products of these tokens alone, without padding, by torch's fastest product in its precision; "
    "a floor with attention has attention's products too. "
    "Bold: faster than every one of ours of its precision."
)


@dataclass(frozen=True, slots=True)
class Load:
    """What each system is asked for in a round.

    Attributes:
        name: unique among the loads of a scene.
        rounds: how often each system gets it.
        texts: in all.
        finals: whether ours and the fastest other system of each precision alone get it.
        facts: its values in a table's columns.
        asked: the requests; empty for the scene's texts in one call.
        callers: how many send a request when their last one is answered; 0: all requests are made at once.
    """

    name: str
    rounds: int
    texts: int
    finals: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    asked: Sequence[Sequence[str]] = ()
    callers: int = 0

    @classmethod
    def of(cls, name: str, asked: Sequence[Sequence[str]], rounds: int, **more: Any) -> Self:
        """The load of some requests."""
        return cls(name, rounds, sum(map(len, asked)), asked=asked, **{"facts": {"load": name}, **more})


@dataclass(slots=True)
class SystemRuns:
    """One system on one model, and its runs.

    Attributes:
        name: the name of its :class:`~embedctl_bench.peers.registry.System`.
        precision: what it promises.
        floor: whether it is the floor of its precision: it is compared with the systems and ranked with none.
        computes: the precision of its products, read back from the loaded system; empty if that is not known.
        setting: the setting that it chose, for people.
        tried: the settings that it chose from, with their seconds or errors.
        accuracy: `max_abs_error`, `min_cosine` and `mean_cosine` of its vectors; empty if it makes none.
        unavailable: why there are no runs, or no more.
        loads: load → round → run.
        rounds: those of one load.
    """

    name: str
    label: str
    precision: str
    ours: bool
    floor: bool = False
    computes: str = ""
    setting: str = ""
    tried: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    unavailable: str = ""
    loads: dict[str, dict[int, Run]] = field(default_factory=dict)
    rounds: Mapping[int, Run] = field(default_factory=dict)

    @classmethod
    def of(cls, system: System) -> Self:
        return cls(system.name, system.label, system.precision, system.ours, system.floor)

    def read_back(self, computes: str) -> None:
        """Take over what it computes in: a system at its default promises that, and fp32 if it is not known."""
        self.computes = computes
        if self.precision == AT_ITS_DEFAULT:
            self.precision = _PROMISED.get(computes.partition(" ")[0], "fp32")

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return median(run.seconds for run in self.rounds.values())

    @property
    def tokens(self) -> int:
        """Tokens that it encodes of the load."""
        return next(iter(self.rounds.values())).tokens

    def ratios(self, other: SystemRuns) -> list[float]:
        """Its rate as a multiple of the other's, for each round in which both ran."""
        both = self.rounds.keys() & other.rounds.keys()
        return [other.rounds[at].seconds / self.rounds[at].seconds for at in sorted(both)]

    def times(self, other: SystemRuns) -> float:
        return median(self.ratios(other))

    def flaw(self, tokens: int) -> str:
        """Why it can't be compared with a system that encodes this number of tokens; empty if it can."""
        if self.tokens < (1 - _MOST_TOKENS_LOST) * tokens:
            return f"encodes {self.tokens:,} tokens of {tokens:,}: it cuts texts"
        error, cosine = (self.accuracy.get(name, nan) for name in ("max_abs_error", "min_cosine"))
        if self.precision == "fp32" and not error <= THRESHOLDS["fp32"].max_abs_error:
            return f"not fp32: max abs error {error:.1e}"
        if not math.isfinite(error):
            return "its vectors hold NaN"
        if self.precision == "fp16" and cosine < THRESHOLDS["fp16"].min_cosine:
            return f"not as accurate as 16 bits: min cosine {cosine:.6f}"
        return ""

    def facts(self) -> dict[str, object]:
        """Its row in a table of systems."""
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


@dataclass(slots=True)
class Comparison:
    """The systems of a scene on one load. Lists of systems have the fastest first.

    Attributes:
        where: the scene and the load, for people.
        systems: those with runs, no floor among them.
        floors: those with runs.
        baseline: what ratios are relative to, if it ran.
    """

    where: str
    load: Load
    systems: list[SystemRuns]
    floors: list[SystemRuns]
    baseline: SystemRuns | None
    model: Model

    @property
    def tokens(self) -> int:
        """Tokens of all texts, as our systems count them; if none of them ran, the largest count of the others."""
        return max([each.tokens for each in self.systems if each.ours] or [each.tokens for each in self.systems])

    def find(self, name: str) -> SystemRuns | None:
        return next((each for each in self.systems if each.name == name), None)

    def floor(self, precision: str, *, attention: bool = False) -> SystemRuns | None:
        found = [each for each in self.floors if each.precision == precision]
        return next((each for each in found if (each.name == ATTENTION_FLOOR.name) == attention), None)

    def comparable(self, precision: str, *, ours: bool) -> list[SystemRuns]:
        """The systems of a precision that have no flaw."""
        found = [each for each in self.systems if each.ours == ours and each.precision == precision]
        return [each for each in found if not each.flaw(self.tokens)]

    def pairs(self) -> Iterator[tuple[SystemRuns, SystemRuns]]:
        """For each precision, our fastest system, and the other system that is fastest in relation to it."""
        for precision in PRECISIONS:
            ours, others = (self.comparable(precision, ours=whose) for whose in (True, False))
            if ours and others:
                yield ours[0], max(others, key=lambda each: each.times(ours[0]))

    def rows(self) -> Iterator[dict[str, object]]:
        """Rows of a table: by precision, the most accurate first; within it by rank, and those with a flaw last."""
        for precision in PRECISIONS:
            found = [each for each in self.systems if each.precision == precision]
            for rank, each in enumerate(sorted(found, key=lambda each: bool(each.flaw(self.tokens))), start=1):
                yield self._row(each, rank)
            if found and (floor := self.floor(precision)):
                gflops = self.model.flops_per_token * floor.tokens / floor.seconds / 1e9
                yield self._row(floor, None) | {"gflops": gflops, "promise": None}
            if found and (floor := self.floor(precision, attention=True)):
                yield self._row(floor, None) | {"promise": None}

    def _row(self, each: SystemRuns, rank: int | None) -> dict[str, object]:
        seconds, durations = each.seconds, [run.seconds for run in each.rounds.values()]
        flaw = "" if each.floor else each.flaw(self.tokens)
        ours = self.comparable(each.precision, ours=True)
        floors = [self.floor(each.precision, attention=which) for which in (False, True)]
        share, with_attention = (
            each.times(floor) if floor and each is not floor and each.ratios(floor) else None for floor in floors
        )
        ahead = bool(ours) and not each.ours and not each.floor and not flaw
        ahead = ahead and all(each.times(other) > 1 for other in ours)
        times = each.ratios(self.baseline) if self.baseline else []
        remarks = [f"not ranked: {flaw}" if flaw else "", "ahead of ours" if ahead else "", each.unavailable]
        return {
            "system": each.label,
            **self.load.facts,
            "rank": None if flaw else rank,
            "promise": PROMISES[each.precision],
            "computes": each.computes,
            "setting": each.setting,
            "seconds": seconds,
            "spread_percent": 100 * spread(durations) if len(durations) > 1 else None,
            "texts_per_s": self.load.texts / seconds,
            "requests_per_s": len(self.load.asked) / seconds if self.load.asked else None,
            "tokens_per_s": each.tokens / seconds,
            "times": median(times) if times else None,
            "least_times": min(times, default=None),
            "most_times": max(times, default=None),
            "share_of_floor": share,
            "share_with_attention": with_attention,
            **percentiles([latency for run in each.rounds.values() for latency in run.latencies]),
            **each.accuracy,
            "max_abs_error": f"{each.accuracy['max_abs_error']:.1e}" if each.accuracy else None,
            "idle_percent": 100 * median(run.idle for run in each.rounds.values()),
            "remark": "; ".join(filter(None, remarks)),
            "_bold": ahead,
            "_noisy": len(durations) > 1 and is_noisy(durations),
        }


@dataclass(slots=True)
class Scene:
    """All systems on one model, in one place.

    Attributes:
        name: for people, as the command line has the model, and what else tells it from the other scenes.
        shown: the model and the texts in words.
        base: systems, and what they are in words; ratios are relative to the first of them that ran.
    """

    name: str
    model: Model
    shown: str
    loads: Sequence[Load]
    base: tuple[Sequence[str], str] = ((BASELINE, SENTENCE_TRANSFORMERS.name), "sentence-transformers on torch in fp32")
    runs: list[SystemRuns] = field(default_factory=list)

    def on(self, load: Load) -> Comparison:
        """What was measured so far with a load."""
        runs = [replace(each, rounds=each.loads[load.name]) for each in self.runs if each.loads.get(load.name)]
        runs.sort(key=lambda each: each.seconds)
        systems, floors = ([each for each in runs if each.floor == which] for which in (False, True))
        bases = [each for name in self.base[0] for each in systems if each.name == name]
        where = f"{self.name}, {load.name}" if len(self.loads) > 1 else self.name
        return Comparison(where, load, systems, floors, bases[0] if bases else None, self.model)

    def measured(self) -> list[Comparison]:
        """What was measured so far, by loads."""
        found = [self.on(load) for load in self.loads]
        return [each for each in found if each.systems]

    def finalists(self) -> set[str]:
        """Names of ours, and of the fastest other system of each of our precisions with the first load."""
        first = self.on(self.loads[0])
        return {each.name for each in self.runs if each.ours} | {other.name for _, other in first.pairs()}

    def tables(self, name: str, published: Sequence[Mapping[str, object]]) -> Iterator[Table]:
        """The figures, beside published ones; ours beside each other system; and what each system is."""
        measured = self.measured()
        rows = [row for each in measured for row in each.rows()]
        if not rows:
            return
        yield Table(f"{name}-figures", self.name, COLUMNS, [*rows, *published], _NOTE.format(base=self.base[1]))
        if self.base[0][0] == BASELINE and (beside := self._beside(measured[0])).rows:
            yield replace(beside, name=f"{name}-beside")
        facts = [each.facts() for each in self.runs if each.loads]
        note = "A setting is processes × threads, and options."
        yield Table(f"{name}-systems", f"{self.name}: settings and versions", _SYSTEM_COLUMNS, facts, note)

    def _beside(self, comparison: Comparison) -> Table:
        """Each of ours beside each other system, whatever the precision of either."""
        ours, others = ([each for each in comparison.systems if each.ours == whose] for whose in (True, False))
        columns = [Column("system", "× the rate of"), Column("promise", "promises")]
        columns += [Column(each.name, each.label) for each in ours]
        rows = [
            {
                "system": other.label,
                "promise": PROMISES[other.precision],
                **{each.name: in_words(each.ratios(other)) for each in ours},
            }
            for other in sorted(others, key=lambda each: PRECISIONS.index(each.precision))
        ]
        note = "Median of the rounds (least–most). Systems that promise less stand beside those of more."
        return Table("beside", f"{comparison.where}: ours, × each other system", columns, rows if ours else [], note)

    def notes(self) -> Iterator[str]:
        """Which systems have no runs or no more, and which ratios are missing."""
        for each in self.runs:
            if each.unavailable:
                yield f"{self.name}: {each.label}: not available: {each.unavailable}"
        if any(comparison.baseline is None for comparison in self.measured()):
            yield f"{self.name}: there are no ratios where {self.base[1]} was not measured."


def each_scene(scenes: Sequence[Scene], of: Callable[[Scene], Iterator[Any]]) -> list[Any]:
    """What a function yields of all scenes."""
    return [found for scene in scenes for found in of(scene)]


def in_words(values: Sequence[float]) -> str | None:
    """The median, the least and the most of ratios."""
    return f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else None
