"""What `embedctl bench engines` measured of every system on one model and workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from embedctl_bench.measuring.comparison import Comparison, Run, SystemRuns
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import BASELINE, SENTENCE_TRANSFORMERS
from embedctl_bench.peers.workload import Workload


@dataclass(slots=True)
class EnginesResult(Comparison[SystemRuns[Run]]):
    """All systems on one model and workload.

    Attributes:
        name: the model as the command line has it.
        shown: the model in words.
        rounds: planned rounds.
        uninstalled: names of the systems that were left out because they are not installed.
        floors: the runs of each precision's floor, which is compared with the systems of that precision and ranked
            with none.
    """

    name: str
    shown: str
    model: Model
    workload: Workload
    rounds: int
    uninstalled: Sequence[str] = ()
    systems: list[SystemRuns[Run]] = field(default_factory=list)
    floors: list[SystemRuns[Run]] = field(default_factory=list)

    @property
    def baseline(self) -> SystemRuns[Run] | None:
        """sentence-transformers on torch, if it ran: the peer, else that of our own environment."""
        return self.find(BASELINE) or self.find(SENTENCE_TRANSFORMERS.name)

    def floor(self, precision: str) -> SystemRuns[Run] | None:
        """The floor of a precision, if it ran."""
        return next((each for each in self.floors if each.runs and each.precision == precision), None)

    @property
    def texts(self) -> int:
        """Texts of the workload."""
        return len(self.workload.lengths)

    def ranked(self, precision: str) -> list[SystemRuns[Run]]:
        """The systems of a precision with runs: those without a flaw first, the fastest first."""
        found = [each for each in self.measured if each.precision == precision]
        return sorted(found, key=lambda each: bool(each.flaw(self.tokens)))

    def shares(self) -> list[tuple[str, list[float]]]:
        """For each class, the whole product's rate as a multiple of its engine's in each round."""
        return [
            (product.label, product.ratios(engine))
            for product in self.measured
            if product.ours and (engine := self.find(product.name.replace("embedctl-", "embedctl-engine-", 1)))
        ]
