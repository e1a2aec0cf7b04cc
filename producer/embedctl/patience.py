"""Waiting for a Redis that went away in the middle of something."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from numbers import Real
from typing import TypeVar

from embedctl.store.connection import answers_by
from embedctl_config.errors import BrokerFull, BrokerRefused, BrokerUnavailable, SettingsError, WaitTimeout

T = TypeVar("T")

#: Who is in the middle of something waits this long for Redis to come back (seconds).
OUTAGE_S = 120.0
_LONGEST_PAUSE_S = 2.0


def patiently(
    ask: Callable[[], T],
    *,
    pausing: Callable[[], None] = lambda: None,
    deadline: float | None = None,
    outage_s: float = OUTAGE_S,
) -> T:
    """Ask Redis until it answers: as long as it is full, and for a time while it is away.

    Args:
        ask: a question that may be asked twice.
        pausing: called before each pause.
        deadline: by the monotonic clock. No question but the first is asked after it; one that waits for a Redis that
            says nothing ends a socket's time-out after it at the latest.
        outage_s: how long Redis may be away (seconds).

    Raises:
        BrokerUnavailable: it stayed away; BrokerRefused at once, as it would be each time.
        WaitTimeout: the deadline came before.
    """
    pause, away_since = 0.1, time.monotonic()
    while True:
        try:
            with answers_by(deadline):
                return ask()
        except BrokerRefused:
            raise
        except BrokerUnavailable as error:
            now = time.monotonic()
            if isinstance(error, BrokerFull):
                away_since = now
            elif now - away_since >= outage_s:
                raise
            if deadline is not None and now >= deadline:
                raise out_of_time(error) from error
        pausing()
        time.sleep(pause if deadline is None else min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(_LONGEST_PAUSE_S, pause * 2)


def out_of_time(error: BrokerUnavailable) -> WaitTimeout:
    """The error for those whose time is over while they wait for Redis."""
    return WaitTimeout(f"the time to wait is over, and Redis did not do what it was asked to: {error}")


def came_of_an_absence(error: BaseException) -> bool:
    """Whether the time was over while Redis was away: then it can't be told to cancel, and asking takes time again."""
    cause = error.__cause__ if isinstance(error, WaitTimeout) else None
    return isinstance(cause, BrokerUnavailable) and not isinstance(cause, BrokerFull)


def check_timeout(timeout: object) -> None:
    """Refuse what is no time to wait.

    Raises:
        SettingsError: it is neither None nor a number of seconds from 0 on.
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or math.isnan(timeout) or timeout < 0:
        raise SettingsError(f"timeout {timeout!r} is no number of seconds from 0 on; None waits for good")
