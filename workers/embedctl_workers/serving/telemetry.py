"""What a worker reports about its work."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from embedctl_config.wire import ErrorCode

if TYPE_CHECKING:
    from embedctl.store import Claim
    from embedctl.store.connection import Observer
    from embedctl_workers.accuracy.report import Report
    from embedctl_workers.serving.in_hand import InHand

Stage = Literal["tokenise", "encode", "store"]


class Telemetry:
    """Is told what happens, and ignores it; :class:`~embedctl_workers.serving.metrics.Metrics` counts it.

    Several threads may call its methods at once, and none raises.
    """

    @property
    def observer(self) -> Observer | None:
        """What is told of round trips to Redis; None if nothing observes them."""
        return None

    def watch(self, in_hand: InHand) -> None:
        """The worker is about to take chunks: what it holds and its progress may be read from now on."""

    def loaded(self, model: str, engine: str, chosen: str) -> None:
        """A model was loaded into an engine, which was perhaps chosen by its speed: both in words."""

    def gated(self, model: str, report: Report) -> None:
        """A model passed its gate."""

    def claimed(self, model: str, claim: Claim) -> None:
        """A worker took a chunk."""

    def staged(self, model: str, stage: Stage, seconds: float) -> None:
        """A chunk passed a stage."""

    def batched(self, model: str, seconds: float) -> None:
        """The device finished a batch."""

    def encoded(self, model: str, tokens: int, positions: int) -> None:
        """A chunk was encoded; tokens are counted without padding, positions with it."""

    def answered(self, model: str, answer: str, done: int, codes: Collection[ErrorCode]) -> None:
        """Redis answered to a result (`ok`: it took it) with `done` vectors, and a code for each other record."""

    def failed(self, model: str) -> None:
        """A chunk failed as a whole, and will be offered again."""
