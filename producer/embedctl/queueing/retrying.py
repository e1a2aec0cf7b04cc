"""Asking a Redis again that is away or full, and how long a call may wait at all."""

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
    BrokerUnavailable,
    SettingsError,
    WaitTimeout,
)
from embedctl_config.retry import REDIS, RetryLimit

T = TypeVar("T")


def retry_redis(
    ask: Callable[[], T],
    *,
    pausing: Callable[[BrokerUnavailable], None] | None = None,
    deadline: float | None = None,
    retry_s: float | None = None,
) -> T:
    """Ask Redis until it answers, with back-off: as long as it is full, and while it is away for `retry_s` seconds, or
    as long as :class:`RetryLimit` says. The question may be asked twice. `pausing` is called before each pause with
    what Redis, or the place of chunks outside of it, answered.

    Only the first question may be asked after the deadline (monotonic clock). If Redis does not answer at all, this
    ends at most one socket timeout later. Raises BrokerUnavailable if Redis stayed away, WaitTimeout if the deadline
    came first, and BrokerRefused at once, because a retry would not help.
    """
    with answers_by(deadline):
        return REDIS.call(ask, BrokerUnavailable, failed=RetryLimit(deadline, retry_s, pausing=pausing))


def is_redis_away(error: BaseException) -> bool:
    """Whether a time limit was reached while Redis was away: then it can't be told to cancel, and asking takes time."""
    cause = error.__cause__ if isinstance(error, WaitTimeout) else None
    return isinstance(cause, BrokerUnavailable) and not isinstance(cause, BrokerFull)


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """How long a call may wait: `timeout` seconds, or without limit if that is None, from a moment of the monotonic
    clock on."""

    timeout: float | None
    began: float

    @classmethod
    def from_now(cls, timeout: float | None) -> Self:
        """A limit that counts from this moment; raises as :func:`check_timeout`."""
        check_timeout(timeout)
        return cls(timeout, time.monotonic())

    @property
    def deadline(self) -> float | None:
        """When the time is over, by the monotonic clock; None for never."""
        return None if self.timeout is None else self.began + self.timeout


def check_timeout(timeout: object) -> None:
    """Raise SettingsError if a timeout is neither None nor a number of seconds from 0 on."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or math.isnan(timeout) or timeout < 0:
        raise SettingsError(f"timeout {timeout!r} is not a number of seconds, 0 or more; None waits without limit")
