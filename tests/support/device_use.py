"""A device use that a test controls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from embedctl_workers.encoding.prepared import DeviceUse, Stopped


class RecordedUse(DeviceUse):
    """Records the tokens of each batch.

    Args:
        wanted: called before each batch.
        turn: makes the context of a turn.
    """

    def __init__(
        self,
        *,
        wanted: Callable[[], bool] = lambda: True,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._wanted, self._turn = wanted, turn
        self.batches: list[int] = []

    def turn(self) -> AbstractContextManager[object]:
        return self._turn()

    def check_wanted(self) -> None:
        if not self._wanted():
            raise Stopped

    def on_batch(self, tokens: int) -> None:
        self.batches.append(tokens)
