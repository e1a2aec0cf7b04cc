"""The cells of `embedctl bench matrix`, their measurements, and the published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from embedctl_bench.measuring.cells import Found
from embedctl_bench.measuring.sampled import Effort
from embedctl_bench.measuring.sampling import REPEATS
from embedctl_bench.peers.registry import System
from embedctl_workers.models.files import ModelFiles

#: The publication's price of an hour of an inf2.xlarge ($).
PRICE = 0.758
#: Published for bge-base on an inf2.xlarge at that price: inferences/s and $ for a million.
PUBLISHED = ((966.409, 0.218), (1001.071, 0.211))

#: For one cell, all rounds together.
_EFFORT = Effort(seconds=15.0, least=6, most=600)


@dataclass(frozen=True, slots=True)
class MatrixScope:
    """The cells, and how much is measured of each."""

    batches: Sequence[int] = (1, 16, 32)
    sequences: Sequence[int] = (256, 512)
    models: Sequence[int] = (1, 2)
    workers: Sequence[int] = (1, 2)
    effort: Effort = _EFFORT
    rounds: int = 3
    repeats: int = REPEATS

    def steps(self, systems: int) -> int:
        """Steps of a session for one model."""
        cells = len(self.batches) * len(self.sequences) * len(self.models) * len(self.workers)
        return (2 + cells * self.rounds) * systems


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """A cell: `models` processes, each with a copy of the model and `workers` concurrent requests."""

    system: System
    models: int
    workers: int
    sequence: int
    found: Found


@dataclass(slots=True)
class MatrixResult:
    """All measurements of one model."""

    model: ModelFiles
    shown: str
    cells: list[MatrixCell] = field(default_factory=list)
    engines: dict[System, str] = field(default_factory=dict)
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
