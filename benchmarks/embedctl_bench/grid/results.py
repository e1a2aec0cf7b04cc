"""The cells of `embedctl bench grid`, their measurements, and the published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from embedctl_bench.measuring.cells import Found
from embedctl_bench.measuring.sampled import Effort
from embedctl_bench.peers.registry import TRANSFORMERS, System
from embedctl_workers.models.files import ModelFiles

#: Published for DistilBERT at 2 cores and batch 1: length → requests/s of HF Infinity, and of transformers.
PUBLISHED = {
    8: (248, 49),
    16: (212, 50),
    32: (150, 40),
    64: (97, 28),
    128: (55, 18),
    256: (27, 9),
    384: (17, 5),
    512: (12, 4),
}
PUBLISHED_CORES = 2


def times_published(length: int) -> float:
    """The published rate, as a multiple of transformers'."""
    infinity, transformers = PUBLISHED[length]
    return infinity / transformers


@dataclass(frozen=True, slots=True)
class GridScope:
    """The cells, and the effort for each, all rounds together; the floor gets less, because it has no latencies."""

    cores: Sequence[int]
    lengths: Sequence[int]
    batches: Sequence[int]
    effort: Effort
    floor: Effort
    rounds: int
    repeats: int

    @property
    def cells(self) -> int:
        """The number of cells with one number of cores."""
        return len(self.lengths) * len(self.batches)

    def steps(self, systems: int, cores: int) -> int:
        """Steps of a session for one model on `cores` cores; the reference and the floor have no accuracy."""
        cells = self.cells * sum(each <= cores for each in self.cores)
        return systems * (2 + cells * self.rounds) - 2


@dataclass(frozen=True, slots=True)
class GridPlace:
    """A place in the grid; `length` in tokens, `batch` in texts."""

    cores: int
    length: int
    batch: int


@dataclass(slots=True)
class GridResult:
    """All measurements of one model.

    Attributes:
        systems: the systems that could be loaded, with their engines: ours first, without the floor.
    """

    model: ModelFiles
    shown: str
    systems: dict[System, str] = field(default_factory=dict)
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cells: dict[GridPlace, Mapping[str, Found]] = field(default_factory=dict)

    @property
    def ours(self) -> list[System]:
        """Our classes that were measured."""
        return [system for system in self.systems if system.ours]

    def rate(self, place: GridPlace, system: System) -> float | None:
        """The system's rate (texts/s); None if it was not measured there."""
        found = self.cells.get(place, {}).get(system.name)
        return found.rate if found else None

    def times(self, place: GridPlace, system: System, than: System = TRANSFORMERS) -> float | None:
        """The system's rate as a multiple of another's in the same cell."""
        found = self.cells.get(place, {})
        ours, other = found.get(system.name), found.get(than.name)
        return ours.times(other) if ours and other else None

    def at_cores(self) -> int:
        """The number of cores of the published table; the largest number measured if that was not measured."""
        measured = {place.cores for place in self.cells} or {PUBLISHED_CORES}
        return PUBLISHED_CORES if PUBLISHED_CORES in measured else max(measured)
