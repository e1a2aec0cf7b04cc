"""What a worker tells of its work while it does it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from embedctl_config.wire import ErrorCode

if TYPE_CHECKING:
    from embedctl.store import Claim
    from embedctl.store.observed import Observer
    from embedctl_workers.accuracy.report import Report
    from embedctl_workers.serving.runner import ChunkRunner

Stage = Literal["tokenise", "encode", "store"]


class Telemetry:
    """Is told what happens, and does nothing with it; :class:`~embedctl_workers.serving.metrics.Metrics` counts it.

    Its methods may be called by several threads at once, and never raise.
    """

    @property
    def observer(self) -> Observer | None:
        """What is to be told of round trips to Redis; None where nobody wants to know."""
        return None

    def watch(self, runner: ChunkRunner) -> None:
        """The worker is about to take chunks: what it holds and when it made progress may be read from here on."""

    def gated(self, model: str, report: Report) -> None:
        """A model passed its gate."""

    def claimed(self, model: str, claim: Claim, waited_s: float | None) -> None:
        """A chunk was asked for.

        Args:
            waited_s: how old its ticket was; None where that is not known.
        """

    def staged(self, model: str, stage: Stage, seconds: float) -> None:
        """A chunk passed a stage."""

    def batched(self, model: str, seconds: float) -> None:
        """The device did a batch."""

    def encoded(self, model: str, tokens: int, positions: int) -> None:
        """A chunk was encoded.

        Args:
            tokens: without padding.
            positions: with padding.
        """

    def answered(self, model: str, answer: str, done: int, codes: Collection[ErrorCode]) -> None:
        """A chunk's result was offered to Redis.

        Args:
            answer: what Redis said; `ok` if it was taken.
            done: its records with a vector.
            codes: one for each of the others.
        """

    def failed(self, model: str) -> None:
        """A chunk failed as a whole, and will be offered again."""
