"""What `embedctl bench request` runs, and what it measures of each system."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from embedctl_bench.measuring.comparison import Comparison, Run, SystemRuns
from embedctl_bench.measuring.sampling import REPEATS, is_noisy, percentiles, spread
from embedctl_bench.peers.registry import BASELINE, SENTENCE_TRANSFORMERS
from embedctl_bench.request.texts import REQUESTS, TEXTS


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The number of texts in each request.

    Attributes:
        words: for people.
    """

    name: str
    words: str
    sizes: tuple[int, ...]

    @property
    def texts(self) -> int:
        """Texts of all requests."""
        return sum(self.sizes)


WHOLE = RequestShape("whole", "the whole shape", (TEXTS,) * REQUESTS)
#: 255 texts in all: 25 and 26 in alternation.
TENTH = RequestShape("tenth", "a tenth of the shape", (25, 26) * (REQUESTS // 2))
QUICK = RequestShape("quick", "requests of 3 texts", (3,) * REQUESTS)
#: A machine with this number of CPUs runs the whole shape in every round.
_LARGE_MACHINE = 16
_ROUNDS, _QUICK_ROUNDS = 3, 2


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A shape that is run in rounds, and perhaps another that is run once, by ours and the fastest other systems.

    Attributes:
        repeats: how often the rounds of a noisy system are repeated at most.
    """

    shape: RequestShape
    rounds: int
    once: RequestShape | None = None
    repeats: int = REPEATS

    @classmethod
    def of(cls, cpus: int, *, quick: bool) -> RequestPlan:
        """The plan for a number of CPUs."""
        if quick:
            return cls(QUICK, _QUICK_ROUNDS, repeats=0)
        return cls(WHOLE, _ROUNDS) if cpus >= _LARGE_MACHINE else cls(TENTH, _ROUNDS, WHOLE)

    def steps(self, classes: int, peers: int) -> int:
        """Steps of a session for one model, without those of the fastest other systems."""
        return (classes + peers) * (1 + self.rounds) + (classes if self.once else 0)


@dataclass(frozen=True, slots=True)
class RequestRun(Run):
    """Requests that were made at once.

    `seconds` is the time from the first submit to the last vector: stored in ours, returned by other systems.

    Attributes:
        fetched: until the clients had fetched all vectors (seconds).
        latencies: the same as `seconds`, for each request.
    """

    fetched: float
    latencies: Sequence[float]


@dataclass(slots=True)
class RequestSystem(SystemRuns[RequestRun]):
    """The runs of one system on one model; `whole` is the run of the whole shape."""

    whole: RequestRun | None = None

    def row(self, shape: RequestShape, runs: Sequence[RequestRun]) -> dict[str, object]:
        """Its line in a table of runs of a shape."""
        seconds = statistics.median(run.seconds for run in runs)
        waits = percentiles([latency for run in runs for latency in run.latencies])
        several = len(runs) > 1
        return {
            "system": self.label,
            "precision": self.precision,
            "computes": self.computes or None,
            **self.figures(*([self.whole] if self.whole else [])),
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
        figures = self.figures(*([self.whole] if self.whole else []))
        return {"system": self.label, "setting": self.setting, "precision": self.precision, **figures}


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


@dataclass(slots=True)
class RequestResult(Comparison[RequestSystem]):
    """Every system on one model.

    Attributes:
        name: the model as the command line has it.
        plan: what is run.
        uninstalled: names of the systems that were left out because they are not installed.
        model: the model in words.
        limit: the longest text that the model takes whole, in tokens.
        lengths: of the texts with references, in tokens.
    """

    name: str
    plan: RequestPlan
    uninstalled: Sequence[str] = ()
    model: str = ""
    limit: int = 0
    lengths: Sequence[int] = ()
    systems: list[RequestSystem] = field(default_factory=list)

    @property
    def shape(self) -> RequestShape:
        """The shape of the rounds."""
        return self.plan.shape

    @property
    def baseline(self) -> RequestSystem | None:
        """sentence-transformers on torch, if it ran: the peer, else that of our own environment."""
        return self.find(BASELINE) or self.find(SENTENCE_TRANSFORMERS.name)

    def finalists(self) -> list[str]:
        """Names of ours, and of the fastest other system of each of our precisions."""
        others = [other for _, other in self.pairs()]
        return [each.name for each in self.systems if each.runs and (each.ours or each in others)]
