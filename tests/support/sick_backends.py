"""Backends that stop being able to encode, and one that joins batches, for tests that start workers with them."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_workers import backends
from embedctl_workers.backends.dummy import DummyBackend, _token

#: What the backend `hungry` takes for a row of a batch: real memory, and ten times that for the word "huge".
MEGABYTES = 60


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


class HungryBackend(DummyBackend):
    """A dummy that takes real memory."""

    def forward(self, tokens: Any, rows: Any) -> Any:
        ids = tokens.columns["input_ids"]
        np.ones(MEGABYTES * sum(10 if _token("huge") in ids[row] else 1 for row in rows) << 17)
        return super().forward(tokens, rows)


_BACKENDS = {name.lower(): (f"{__name__}:{name}Backend", "") for name in ("Fading", "Joining", "Hungry")}


def register(group: Path | None = None) -> None:
    """Let this process know these backends, by the first words of their names, in a memory cgroup if one is given."""
    if group is not None:
        (group / "cgroup.procs").write_text("0")
    backends.BACKENDS.update(_BACKENDS)
