"""Waits in tests for the work of other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Generous, for busy machines; a test that passes does not wait this long (seconds).
PATIENCE_S = 60.0


def eventually(
    condition: Callable[[], object],
    timeout_s: float = PATIENCE_S,
    *,
    what: str = "it",
    show: Callable[[], str] | None = None,
) -> None:
    """Poll until a condition holds.

    Args:
        condition: called repeatedly; its exceptions propagate.
        timeout_s: shorter than the default only where the time itself is tested.
        what: names the condition, for the error.
        show: more for the error, such as a log.

    Raises:
        AssertionError: the condition still does not hold after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not become true within {timeout_s:g} s\n{show() if show else ''}")
        time.sleep(0.02)
