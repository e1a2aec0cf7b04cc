"""The configurations of `embedctl bench study`, their measurements, and the published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embedctl_bench.measuring.cells import Found
from embedctl_bench.measuring.sampled import Effort
from embedctl_bench.peers.registry import SENTENCE_TRANSFORMERS, System, backend_of
from embedctl_workers.models.files import ModelFiles

TORCH, ONNX, INT8 = SENTENCE_TRANSFORMERS, backend_of("onnx"), backend_of("cpu-int8")
BATCH = 32


@dataclass(frozen=True, slots=True)
class Setup:
    """A row of the study.

    Attributes:
        published: texts/s; 0 for a row that is not in the study.
    """

    label: str
    system: System
    batch: int
    published: float = 0.0


#: The five of the study, in its order.
SETUPS = (
    Setup("torch, single", TORCH, 1, 68),
    Setup("torch, batch 32", TORCH, BATCH, 195),
    Setup("ONNX, single", ONNX, 1, 151),
    Setup("ONNX int8, single", INT8, 1, 234),
    Setup("ONNX int8, batched", INT8, BATCH, 602),
)


@dataclass(frozen=True, slots=True)
class StudyScope:
    """How much is measured; each effort is for all rounds together.

    Attributes:
        texts: number of texts whose vectors are compared.
        requested: requests are made of the first texts, as many as a round gets through several times, so that fast and
            slow systems get the same.
    """

    batches: Sequence[int]
    texts: int
    requested: int
    latency: Effort
    sustained: Effort
    sweep: Effort
    rounds: int
    repeats: int

    def steps(self, setups: int, systems: int) -> int:
        """Steps of a session for one model."""
        of_setups = setups * (2 + 2 * self.rounds)
        return of_setups + len(self.batches) * (systems + (systems + 1) * self.rounds)


@dataclass(slots=True)
class StudyResult:
    """All measurements of one model; what could not be measured is missing.

    Attributes:
        memory: `weights` and `peak` in bytes, and the `engine`.
        latency, sustained, accuracy: by a setup's label.
        sweep: by system and batch.
        padding: by system and batch: positions that only pad, as a share of the tokens.
    """

    model: ModelFiles
    shown: str
    memory: dict[Setup, Mapping[str, Any]] = field(default_factory=dict)
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    latency: Mapping[str, Found] = field(default_factory=dict)
    sustained: Mapping[str, Found] = field(default_factory=dict)
    sweep: dict[tuple[System, int], Found] = field(default_factory=dict)
    padding: dict[tuple[System, int], float] = field(default_factory=dict)

    def times_first(self, setup: Setup) -> float | None:
        """The sustained rate as a multiple of the first row's."""
        found, first = self.sustained.get(setup.label), self.sustained.get(SETUPS[0].label)
        return found.times(first) if found and first else None

    def is_behind(self, setup: Setup) -> bool:
        """Whether it is a smaller multiple of the first row than published."""
        times = self.times_first(setup)
        return times is not None and times < times_published(setup)


def times_published(setup: Setup) -> float:
    """The published rate as a multiple of the first row's; 0 for a row that is not in the study."""
    return setup.published / SETUPS[0].published
