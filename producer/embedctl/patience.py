"""Waiting for a Redis that is away or full, and how long a call may wait at all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Self, TypeVar

from embedctl.store.connection import answers_by
from embedctl_config.errors import (
    BrokerFull,
    BrokerRefused,
    BrokerUnavailable,
    ChunkFilesUnavailable,
    SettingsError,
    WaitTimeout,
)

T = TypeVar("T")

#: A caller in the middle of something waits this long for Redis to come back (seconds).
OUTAGE_S = 120.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


def patiently(
    ask: Callable[[], T],
    *,
    pausing: Callable[[BrokerUnavailable], None] = lambda error: None,
    deadline: float | None = None,
    outage_s: float | None = None,
) -> T:
    """Ask Redis until it answers, with back-off: as long as it is full, and for a time while it is away.

    Args:
        ask: a question that may be asked twice.
        pausing: called before each pause with what Redis, or the place of chunks outside of it, answered.
        deadline: by the monotonic clock. Only the first question may be asked after it. If Redis does not answer at
            all, this ends at most one socket timeout later.
        outage_s: how long Redis may be away (seconds); :data:`OUTAGE_S` if None.

    Raises:
        BrokerUnavailable: Redis stayed away. BrokerRefused is raised at once, because a retry would not help.
        WaitTimeout: the deadline came first.
    """
    pause, outage = _SHORTEST_PAUSE_S, Outage(deadline, outage_s)
    while True:
        try:
            with answers_by(deadline):
                return ask()
        except BrokerUnavailable as error:
            outage.check(error)
            pausing(error)
        time.sleep(cut_short(pause, deadline))
        pause = min(_LONGEST_PAUSE_S, pause * 2)


def what_is_away(error: BrokerUnavailable) -> str:
    """What a caller that got this answer waits for, in words."""
    return (
        f"the place of its chunks: {error}"
        if isinstance(error, ChunkFilesUnavailable)
        else "Redis, which is away or full"
    )


class Outage:
    """A time in which Redis did not answer a caller that asks again and again. It begins when this is made.

    Args:
        deadline: of the caller, by the monotonic clock; None if it has none.
        longest_s: how long Redis may be away (seconds); :data:`OUTAGE_S` if None.
    """

    def __init__(self, deadline: float | None = None, longest_s: float | None = None) -> None:
        self._deadline = deadline
        self._longest_s = OUTAGE_S if longest_s is None else longest_s
        self._since = time.monotonic()

    def check(self, error: BrokerUnavailable) -> None:
        """Redis has not answered, or has no memory left: return if the caller is to ask again.

        Raises:
            BrokerUnavailable: this error, if Redis has been away for too long, or would refuse each time.
            WaitTimeout: the deadline is over.
        """
        now = time.monotonic()
        if isinstance(error, BrokerFull):
            self._since = now
        elif isinstance(error, BrokerRefused) or now - self._since >= self._longest_s:
            raise error
        if self._deadline is not None and now >= self._deadline:
            raise WaitTimeout(f"the wait timed out while Redis was away or full: {error}") from error


def cut_short(pause_s: float, deadline: float | None) -> float:
    """A pause that ends at the deadline (monotonic clock) at the latest; seconds."""
    return pause_s if deadline is None else min(pause_s, max(0.0, deadline - time.monotonic()))


def came_of_an_absence(error: BaseException) -> bool:
    """Whether a time limit was reached while Redis was away: then it can't be told to cancel, and asking takes time."""
    cause = error.__cause__ if isinstance(error, WaitTimeout) else None
    return isinstance(cause, BrokerUnavailable) and not isinstance(cause, BrokerFull)


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """How long a call may wait.

    Attributes:
        timeout: seconds; None for no limit.
        began: since when they count, by the monotonic clock.
    """

    timeout: float | None
    began: float

    @classmethod
    def from_now(cls, timeout: float | None) -> Self:
        """A limit that counts from this moment.

        Raises:
            SettingsError: the timeout is neither None nor a number of seconds from 0 on.
        """
        check_timeout(timeout)
        return cls(timeout, time.monotonic())

    @property
    def deadline(self) -> float | None:
        """When the time is over, by the monotonic clock; None for never."""
        return None if self.timeout is None else self.began + self.timeout


def check_timeout(timeout: object) -> None:
    """Refuse a timeout that is not one.

    Raises:
        SettingsError: it is neither None nor a number of seconds from 0 on.
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or math.isnan(timeout) or timeout < 0:
        raise SettingsError(f"timeout {timeout!r} is not a number of seconds, 0 or more; None waits without limit")
