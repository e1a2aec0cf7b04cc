"""Asking a Redis again that is away or full, and how long a call may wait at all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Self, TypeVar

from embedctl.store.connection import answers_by
from embedctl_config.errors import BrokerFull, BrokerUnavailable, ChunkFilesUnavailable, SettingsError, WaitTimeout
from embedctl_config.retry import REDIS, RetryLimit

T = TypeVar("T")


def retry_redis(
    ask: Callable[[], T],
    *,
    pausing: Callable[[BrokerUnavailable], None] | None = None,
    deadline: float | None = None,
    retry_s: float | None = None,
) -> T:
    """Ask Redis until it answers, with back-off: as long as it is full, and for a time while it is away.

    Args:
        ask: a question that may be asked twice.
        pausing: called before each pause with what Redis, or the place of chunks outside of it, answered.
        deadline: by the monotonic clock. Only the first question may be asked after it. If Redis does not answer at
            all, this ends at most one socket timeout later.
        retry_s: how long Redis may be away (seconds); that of :class:`RetryLimit` if None.

    Raises:
        BrokerUnavailable: Redis stayed away. BrokerRefused is raised at once, because a retry would not help.
        WaitTimeout: the deadline came first.
    """
    with answers_by(deadline):
        return REDIS.call(ask, BrokerUnavailable, failed=RetryLimit(deadline, retry_s, pausing=pausing))


def what_is_away(error: BrokerUnavailable) -> str:
    """What a caller that got this answer waits for, in words."""
    return (
        f"the place of its chunks: {error}"
        if isinstance(error, ChunkFilesUnavailable)
        else "Redis, which is away or full"
    )


def is_redis_away(error: BaseException) -> bool:
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
        """A limit that counts from this moment; raises SettingsError if the timeout is neither None nor a number of
        seconds from 0 on."""
        check_timeout(timeout)
        return cls(timeout, time.monotonic())

    @property
    def deadline(self) -> float | None:
        """When the time is over, by the monotonic clock; None for never."""
        return None if self.timeout is None else self.began + self.timeout


def check_timeout(timeout: object) -> None:
    """Refuse a timeout that is not one; raises SettingsError if it is neither None nor a number of seconds from 0
    on."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or math.isnan(timeout) or timeout < 0:
        raise SettingsError(f"timeout {timeout!r} is not a number of seconds, 0 or more; None waits without limit")
