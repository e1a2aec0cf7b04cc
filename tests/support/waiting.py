"""Waiting in tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A busy machine takes its time; where all is well nobody waits so long (seconds).
PATIENCE_S = 60.0


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S, *, what: str = "it") -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not become true within {timeout_s:g} s"
        time.sleep(0.02)
