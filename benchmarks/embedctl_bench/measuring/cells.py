"""Shared by `matrix`, `study` and `grid`: seats, cases in rounds, and the rows of their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.distance import distance
from embedctl_bench.measuring.sampled import (
    Effort,
    Facts,
    SampledProcess,
    SampledProcesses,
    Samples,
    Seat,
    sample_together,
)
from embedctl_bench.measuring.sampling import (
    NOISY,
    REPEATS,
    Rounds,
    cost_per_million,
    in_rounds,
    is_noisy,
    percentiles,
    spread,
    times,
)
from embedctl_bench.measuring.session import Session
from embedctl_bench.peers.registry import System, class_entry
from embedctl_bench.report.report import Column, Table
from embedctl_config.errors import EmbedctlError, SettingsError
from embedctl_workers.machine.devices import cores_of
from embedctl_workers.machine.discovery import discover, nothing_found
from embedctl_workers.models.files import ModelFiles

#: Columns for :meth:`Found.row`.
RATE = (Column("texts_per_s", "texts/s", digits=1),)
LATENCY = tuple(Column(f"{each}_ms", each, "ms", 2) for each in ("min", "avg", "p50", "p90", "p95", "p99", "max"))
STEPS = tuple(Column(f"{each}_ms", each, "ms", 2) for each in ("pre-process", "prediction", "post-process"))
EFFORT = (Column("samples", "samples"), Column("spread_percent", "spread", "%", 0))


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a case: the samples of the rounds that count, and the rate of each round (texts/s)."""

    samples: Samples
    rates: Rounds[float]
    batch: int

    @property
    def rate(self) -> float:
        """The median of the rounds (texts/s)."""
        return self.samples.rate

    @property
    def noisy(self) -> bool:
        """Whether the rounds differ too much."""
        return is_noisy(self.rates.counted)

    def times(self, other: Found) -> float:
        """The rate as a multiple of the other's, which must come from the same :meth:`Bench.measure`."""
        return times(self.rates, other.rates)

    def cost(self, price: float) -> float:
        """The cost of a million texts, at the price of an hour."""
        return cost_per_million(self.rate, price)

    def row(self, price: float | None = None) -> dict[str, object]:
        """Values for the columns of this module; None for steps that a system does not show."""
        shown = self.samples.predict_s > 0
        steps = zip(STEPS, (self.samples.pre_s, self.samples.predict_s, self.samples.post_s), strict=True)
        return {
            "batch": self.batch,
            "texts_per_s": self.rate,
            "requests_per_s": self.rate / self.batch,
            **{f"{name}_ms": value for name, value in percentiles(self.samples.latencies).items()},
            **{column.key: seconds * 1000 if shown else None for column, seconds in steps},
            "samples": len(self.samples.latencies),
            "spread_percent": 100 * spread(self.rates.counted),
            "cost_per_million": None if price is None else self.cost(price),
            "_noisy": self.noisy,
        }


@dataclass(frozen=True, slots=True)
class Case:
    """A system that takes a turn in each round.

    Attributes:
        seats: one process on each.
        requests: all with the same number of texts.
        effort: for all rounds together.
    """

    system: System
    seats: Sequence[Seat]
    requests: Sequence[Sequence[str]]
    effort: Effort


@dataclass(slots=True)
class Noise:
    """Counts of noisy cases, for one sentence of a report instead of a line each."""

    cases: int = 0
    repeated: int = 0
    left: int = 0

    def note(self, rounds: int, repeats: int) -> str:
        """The sentence."""
        begin = f"{rounds} rounds, systems by turns. Of {self.cases} cases "
        limit = f"{NOISY:.0%} between rounds"
        if not repeats:
            return (
                f"{begin}{self.left} differ by more than {limit} and are marked noisy; with --quick none is repeated."
            )
        return (
            f"{begin}{self.repeated} differed by more than {limit} and were measured again, up to {repeats} times; the "
            f"set of rounds with the least spread counts. {self.left} still differ by more and are marked noisy."
        )


@dataclass(slots=True)
class Bench:
    """One run of a benchmark.

    Attributes:
        skipped: cells that could not be measured, and the reason → their number.
    """

    asked: Asked
    session: Session
    processes: SampledProcesses
    rounds: int
    repeats: int = REPEATS
    noise: Noise = field(default_factory=Noise)
    skipped: dict[tuple[str, str], int] = field(default_factory=dict)

    def skip(self, what: str, why: str, cells: int = 1) -> None:
        """Note cells that are left out."""
        self.skipped[what, why] = self.skipped.get((what, why), 0) + cells

    def alone(self, system: System, model: ModelFiles) -> SampledProcess:
        """The system in one process on all CPUs of `--cpus`.

        Raises:
            EmbedctlError: it can't be loaded.
        """
        return self.processes.get(system, model, seats_on(system, self.asked, 1)[0])

    def facts(self, system: System, model: ModelFiles) -> Facts | None:
        """Facts of the system with this model; None, with a note, if it can't be loaded."""
        key = f"{model.name}/{system.name}/facts"
        try:
            return Facts(**self.session.step(key, lambda: asdict(self.alone(system, model).facts)))
        except EmbedctlError as error:
            self.session.note(f"**Not measured: {system.name}** with {model.name}: {error}")
            return None

    def accuracy(
        self, requests: Mapping[str, tuple[System, int]], reference: System, model: ModelFiles, texts: Sequence[str]
    ) -> dict[str, dict[str, float]]:
        """The distance of vectors of unit length from the reference's, one text at a time, by the names given.

        Args:
            requests: systems, and the number of texts in a request.
        """
        found: dict[str, dict[str, float]] = {}
        kept: list[npt.NDArray[np.float32]] = []

        def compare(system: System, batch: int) -> dict[str, float]:
            if not kept:
                kept.append(self.alone(reference, model).encode(texts, 1))
            return distance(self.alone(system, model).encode(texts, batch), kept[0])

        for name, (system, batch) in requests.items():
            key = f"{model.name}/{system.name}/accuracy in {batch}"
            try:
                found[name] = self.session.step(key, partial(compare, system, batch))
            except EmbedctlError as error:
                self.session.note(f"**Accuracy not measured: {name}** with {model.name}: {error}")
        return found

    def measure(self, key: str, model: ModelFiles, cases: Mapping[str, Case]) -> dict[str, Found]:
        """Measure cases by turns. A case that fails is left out, with a note in the session."""
        repeated: list[str] = []

        def tell(line: str) -> None:
            repeated.append(line)
            self.session.say(line)

        rounds = in_rounds(
            {name: partial(self._sample, model, case) for name, case in cases.items()},
            self.rounds,
            session=self.session,
            key=f"{model.name}/{key}",
            figure=lambda each: float(each["rate"]),
            repeats=self.repeats,
            tell=tell,
        )
        found = {
            name: Found(
                Samples.merged(each.counted), each.each(lambda part: float(part["rate"])), len(cases[name].requests[0])
            )
            for name, each in rounds.items()
            if each.counted
        }
        self.noise.cases += len(found)
        self.noise.repeated += len(repeated)
        self.noise.left += sum(each.noisy for each in found.values())
        return found

    def _sample(self, model: ModelFiles, case: Case) -> dict[str, Any]:
        processes = [self.processes.get(case.system, model, seat) for seat in case.seats]
        return sample_together(processes, case.requests, case.effort.share(self.rounds)).to_json()

    def skipped_table(self, name: str) -> Table:
        """A table of the cells that could not be measured, and why."""
        rows = [{"what": what, "why": why, "cells": cells} for (what, why), cells in self.skipped.items()]
        columns = (Column("what", "left out"), Column("cells", "cells"), Column("why", "because"))
        return Table(name, "What this machine or this model can't do", columns, rows)


def listed(values: Sequence[int]) -> str:
    """`1, 2 and 4`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def seats_on(system: System, asked: Asked, count: int) -> list[Seat]:
    """Equal shares of the cores for `count` processes, each with an accelerator if the class needs one.

    Raises:
        SettingsError: there are fewer cores or accelerators.
    """
    cores = cores_of(asked.cpus)
    if count > len(cores):
        raise SettingsError(f"{count} processes need a core each, and --cpus gives {len(cores)}")
    share = len(cores) // count
    cpus = [frozenset[int]().union(*cores[at * share : (at + 1) * share]) for at in range(count)]
    device = class_entry(system.hardware, asked.settings).device if system.ours else "cpu"
    if device == "cpu":
        return [Seat(each) for each in cpus]
    machine = discover(asked.cpu_list)
    accelerators = machine.accelerators(device)
    if not accelerators:
        raise nothing_found(system.hardware, device, machine.problems.get(device, ""))
    if count > len(accelerators):
        raise SettingsError(f"{count} processes need a {device} each, and there are {len(accelerators)}")
    return [Seat(each, accelerator) for each, accelerator in zip(cpus, accelerators, strict=False)]
