"""Waiting for a Redis that went away in the middle of something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from embedctl_config.errors import BrokerFull, BrokerRefused, BrokerUnavailable

T = TypeVar("T")

#: Who is in the middle of something waits this long for Redis to come back (seconds).
OUTAGE_S = 120.0
_LONGEST_PAUSE_S = 2.0


def patiently(ask: Callable[[], T], *, pausing: Callable[[], None] = lambda: None, deadline: float | None = None) -> T:
    """Ask Redis until it answers: as long as it is full, and for `OUTAGE_S` while it is away.

    Args:
        ask: a question that may be asked twice.
        pausing: called before each pause.
        deadline: by the monotonic clock; no pause begins after it.

    Raises:
        BrokerUnavailable: it stayed away; BrokerRefused at once, as it would be each time.
    """
    pause, away_since = 0.1, time.monotonic()
    while True:
        try:
            return ask()
        except BrokerRefused:
            raise
        except BrokerUnavailable as error:
            now = time.monotonic()
            if isinstance(error, BrokerFull):
                away_since = now
            if now - away_since > OUTAGE_S or (deadline is not None and now > deadline):
                raise
        pausing()
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE_S, pause * 2)
