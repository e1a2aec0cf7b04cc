"""Waits in tests for the work of other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Generous, for busy machines; a test that passes does not wait this long (seconds).
PATIENCE_S = 120.0


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
        show: what to see of it in the error, such as a log; by default the condition's last answer.

    Raises:
        AssertionError: the condition still does not hold after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.01
    while not (seen := condition()):
        if time.monotonic() > deadline:
            shown = show() if show else f"The last answer was {seen!r}"
            raise AssertionError(f"{what} did not become true within {timeout_s:g} s\n{shown}")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.1)  # what takes long is not asked for more often than need be
