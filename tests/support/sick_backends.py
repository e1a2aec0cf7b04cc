"""Backends that stop being able to encode, and one that joins batches, for tests that start workers with them."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from embedctl_workers import backends
from embedctl_workers.backends.dummy import DummyBackend


class FadingBackend(DummyBackend):
    """The dummy on a host where another process takes the memory after some batches."""

    OPTIONS = (*DummyBackend.OPTIONS, "batches")

    def __init__(self, *, batches: int, **options: Any) -> None:
        super().__init__(**options)
        self._left = batches

    def forward(self, tokens: Any, rows: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MemoryError("the host has no memory left")
        return super().forward(tokens, rows)


class JoiningBackend(DummyBackend):
    """A dummy on a device of its own, which takes a while for a batch of several chunks, and logs its size."""

    OPTIONS = DummyBackend.OPTIONS
    joins = budget_by_sum = True

    def __init__(self, **options: Any) -> None:
        super().__init__(poison=True, **options)
        self.ahead, self.token_budget = 1, 200
        self._device = ThreadPoolExecutor(1)

    def forward(self, tokens: Any, rows: Any) -> Any:
        logging.getLogger("embedctl.device").warning("a batch of %d texts", len(rows))

        def compute() -> Any:
            time.sleep(0.1)
            return DummyBackend.forward(self, tokens, rows)

        return self._device.submit(compute)

    def finish(self, output: Any, *, normalize: bool) -> Any:
        return super().finish(output.result(), normalize=normalize)


_BACKENDS = {name.lower(): (f"{__name__}:{name}Backend", "") for name in ("Fading", "Joining")}


def register() -> None:
    """Let this process know these backends, by the first words of their names."""
    backends.BACKENDS.update(_BACKENDS)
