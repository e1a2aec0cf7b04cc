"""Trying again: the one mechanism for whatever may fail and is tried again, and its policies.

Nearly every first try succeeds. tenacity takes 30 µs a call, and up to 15 ms to import, so it comes in with a failure.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from embedctl_config.errors import BrokerFull, BrokerRefused, EmbedctlError, GatewayUnavailable, WaitTimeout

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

#: What is tried again.
Errors = type[Exception] | tuple[type[Exception], ...]
#: Called after each failure but the last, with the error and the pause to come (seconds). It returns another pause, or
#: None for this one, and raises what ends the tries.
Failed = Callable[[Any, float], float | None]

#: A caller in the middle of something waits this long for Redis to come back (seconds).
RETRY_S = 120.0


class _NotYet(Exception):
    """Raised with an answer that is not the one waited for."""


@dataclass(slots=True)
class Streak:
    """Counts failures in a row, for a caller that makes progress between two of them."""

    failures: int = 0

    def end(self) -> None:
        """There was progress: count from zero again."""
        self.failures = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """How long to pause before another try.

    Attributes:
        first_s: the pause after the first failure; it doubles with each further one, up to the longest.
        jitter: the part of each pause that is left to chance, 0 to 1: callers that failed together come back one by
            one.
    """

    first_s: float
    longest_s: float
    jitter: float = 0.0

    def pause_s(self, failures: int) -> float:
        """The pause after a number of failures in a row (seconds)."""
        pause_s = min(self.longest_s, self.first_s * 2.0 ** min(max(0, failures - 1), 30))
        return pause_s * (1 - self.jitter * random.random())  # noqa: S311  (it protects nothing)

    def call(
        self,
        ask: Callable[[], T],
        on: Errors,
        *,
        failed: Failed | None = None,
        tries: int | None = None,
        streak: Streak | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> T:
        """What `ask` returns, which is called again after these errors; others leave at once.

        Args:
            failed: is told of each failure, and may end the tries.
            tries: the number of failures in a row that ends them with the last error; None for no limit.
            streak: counts the failures.
            sleep: waits for some seconds; if it returns true, as :meth:`threading.Event.wait` does, the last error
                ends the tries. :func:`time.sleep` if None.
        """
        try:
            return ask()
        except on as error:
            each = _Tries(self, failed, tries, streak or Streak(), [error])

        def once() -> T:
            each.repeat_first()
            return ask()

        def slept(seconds: float) -> None:
            if (sleep or time.sleep)(seconds):
                raise each.last

        from tenacity import Retrying, retry_if_exception_type

        return Retrying(retry=retry_if_exception_type(on), wait=each.pause_s, sleep=slept)(once)

    async def acall(self, ask: Callable[[], Awaitable[T]], on: Errors, *, failed: Failed | None = None) -> T:
        """As :meth:`call`, in an event loop."""
        try:
            return await ask()
        except on as error:
            each = _Tries(self, failed, None, Streak(), [error])

        async def once() -> T:
            each.repeat_first()
            return await ask()

        from tenacity import AsyncRetrying, retry_if_exception_type

        return await AsyncRetrying(retry=retry_if_exception_type(on), wait=each.pause_s, sleep=asyncio.sleep)(once)

    def until(
        self,
        ask: Callable[[], T],
        arrived: Callable[[T], object],
        *,
        waiting: Callable[[], None] = lambda: None,
        tries: int | None = None,
    ) -> T:
        """What `ask` returns, which is called again until that has `arrived`.

        Args:
            waiting: called before each pause; raises what ends the wait.
            tries: how often it is asked at most; then the last answer is returned. None for no limit.
        """

        def once() -> T:
            answer = ask()
            if not arrived(answer):
                raise _NotYet(answer)
            return answer

        def failed(_: _NotYet, pause_s: float) -> float:
            waiting()
            return pause_s

        try:
            return self.call(once, _NotYet, failed=failed, tries=tries)
        except _NotYet as last:
            return cast("T", last.args[0])

    def serve(self, step: Callable[[], float | None], failed: Failed, stopping: threading.Event) -> None:
        """Take one step after the other, each again until it succeeds, until `stopping` is set.

        A step returns how long to rest after it (seconds), and `failed` is told of each failure.
        """
        while not stopping.is_set():
            try:
                stopping.wait(self.call(step, Exception, failed=failed, sleep=stopping.wait) or 0.0)
            except Exception:
                if not stopping.is_set():  # otherwise it only ends the tries, and `failed` knows of it
                    raise


@dataclass(frozen=True, slots=True)
class Growing:
    """A pause that is a part of the time waited so far: what has taken long may be seen a moment later."""

    part: float
    shortest_s: float
    longest_s: float

    def pause_s(self, waited_s: float) -> float:
        """The pause after some time waited (both seconds)."""
        return min(self.longest_s, max(self.shortest_s, waited_s * self.part))


#: Redis, which comes back within seconds of a restart. All of its clients wait for it at the same time.
REDIS = Policy(0.05, 2.0, jitter=0.25)
#: Services of others: databases, and hubs of models.
OUTSIDE = Policy(1.0, 60.0)
#: Something that another process, or Redis, is about to do.
POLL = Policy(0.005, 1.0)
#: The end of a job whose events are heard: only a lost event makes a look find anything.
EVENT = Growing(1 / 8, 1.0, 5.0)
#: A thread or task in the background, which tries for as long as its process lives.
ASIDE = Policy(0.5, 5.0)


@dataclass(slots=True)
class RetryLimit:
    """How long a caller asks again while Redis does not answer. The time begins when this is made.

    It is what a policy calls after each failure: it ends the tries in time.

    Args:
        deadline: of the caller, by `now`; None if it has none. A pause ends with it.
        longest_s: how long Redis may be away (seconds); :data:`RETRY_S` if None.
        pausing: called before each pause with what Redis, or the store of chunks outside of it, answered.
        while_full: whether a full Redis counts as there, so that it is waited for without limit.
        now: the clock (seconds).
    """

    deadline: float | None = None
    longest_s: float | None = None
    _: KW_ONLY
    pausing: Callable[[Any], object] | None = None
    while_full: bool = True
    now: Callable[[], float] = field(default_factory=lambda: time.monotonic)
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.now()

    def __call__(self, error: EmbedctlError, pause_s: float) -> float:
        """Redis has not answered, or has no memory left: return how long to pause (seconds) if it is to be asked again.

        Raises this error if Redis has been away for too long or would refuse each time; WaitTimeout after the deadline.
        """
        now, longest_s = self.now(), RETRY_S if self.longest_s is None else self.longest_s
        if self.while_full and isinstance(error, BrokerFull):
            self._since = now
        elif isinstance(error, BrokerRefused) or now - self._since >= longest_s:
            raise error
        if self.deadline is not None and now >= self.deadline:
            raise WaitTimeout(f"the wait timed out while Redis was away or full: {error}") from error
        if self.pausing is not None:
            self.pausing(error)
        if isinstance(error, GatewayUnavailable):
            pause_s = max(pause_s, error.retry_after_s)
        return pause_s if self.deadline is None else min(pause_s, max(0.0, self.deadline - self.now()))


@dataclass(slots=True)
class _Tries:
    """What tenacity asks about the tries of one call. The first, made without it, is repeated with its error."""

    policy: Policy
    failed: Failed | None
    tries: int | None
    streak: Streak
    first: list[Exception]
    last: BaseException = field(init=False)

    def repeat_first(self) -> None:
        """Fail as the first try did, at once; do nothing the next time."""
        if self.first:
            raise self.first.pop()

    def pause_s(self, state: RetryCallState) -> float:
        """The pause before another try (seconds). Raises the last error if there is none, or what `failed` raises."""
        error = None if state.outcome is None else state.outcome.exception()
        assert error is not None
        self.last = error
        self.streak.failures += 1
        if self.streak.failures == self.tries:
            raise error
        pause_s = self.policy.pause_s(self.streak.failures)
        other_s = None if self.failed is None else self.failed(error, pause_s)
        return pause_s if other_s is None else other_s
