"""Trying again: pauses, what ends the tries, and how long a Redis that is away or full is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl_config import retry
from embedctl_config.errors import (
    BrokerFull,
    BrokerRefused,
    BrokerUnavailable,
    EmbedctlError,
    JobCancelled,
    NotPermitted,
    WaitTimeout,
)
from embedctl_config.retry import ASIDE, OUTSIDE, POLL, REDIS, RETRY_S, Policy, RetryLimit, Streak
from tests.support.clocks import SleptClock

PLAIN = Policy(1.0, 8.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SleptClock:
    clock = SleptClock()
    monkeypatch.setattr(retry, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", clock.asleep)
    return clock


def failing_until(clock: SleptClock, time: float, error: type[BaseException]) -> Callable[[], str]:
    def ask() -> str:
        if clock.now < time:
            raise error(f"at {clock.now:g}")
        return "answer"

    return ask


def failing(times: int, error: type[BaseException] = OSError) -> Callable[[], str]:
    turns = count(1)

    def ask() -> str:
        if (turn := next(turns)) <= times:
            raise error(f"try {turn}")
        return "answer"

    return ask


def called(ask: Callable[[], str], failed: retry.Failed) -> str:
    return REDIS.call(ask, EmbedctlError, failed=failed)


def acalled(ask: Callable[[], str], failed: retry.Failed) -> str:
    async def asked() -> str:
        return ask()

    return asyncio.run(REDIS.acall(asked, EmbedctlError, failed=failed))


@pytest.fixture(params=[called, acalled])
def call(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Asks by the policy for Redis: in a thread, and in an event loop."""
    return request.param  # type: ignore[no-any-return]


# Pauses


@given(
    first_s=st.floats(0.001, 100),
    longest_s=st.floats(0.001, 10_000),
    jitter=st.floats(0, 1),
    failures=st.integers(1, 10_000),
)
def test_a_pause_doubles_up_to_the_longest(first_s: float, longest_s: float, jitter: float, failures: int) -> None:
    whole_s = Policy(first_s, longest_s).pause_s(failures)
    assert whole_s == min(longest_s, first_s * 2 ** min(failures - 1, 30))
    assert whole_s * (1 - jitter) * 0.999999 <= Policy(first_s, longest_s, jitter).pause_s(failures) <= whole_s


@pytest.mark.parametrize(
    ("policy", "pauses"),
    [
        (OUTSIDE, [1, 2, 4, 8, 16, 32, 60]),
        (POLL, [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1]),
        (ASIDE, [0.5, 1, 2, 4, 5]),
    ],
)
def test_the_pauses_of_each_policy(clock: SleptClock, policy: Policy, pauses: list[float]) -> None:
    assert policy.call(failing(len(pauses)), OSError) == "answer"
    assert clock.pauses == pauses


def test_the_clients_of_a_redis_do_not_come_back_together(clock: SleptClock) -> None:
    REDIS.call(failing(20), OSError)
    assert 0.0375 <= clock.pauses[0] <= 0.05
    assert all(1.5 <= pause <= 2 for pause in clock.pauses[6:])
    assert len(set(clock.pauses[6:])) > 1


# What ends the tries


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("failures", [0, 2])
def test_other_errors_leave_at_once(
    clock: SleptClock, call: Callable[..., str], error: type[BaseException], failures: int
) -> None:
    turns = count()

    def ask() -> str:
        raise error if next(turns) == failures else NotPermitted

    with pytest.raises(error):
        call(ask, lambda *_: None)
    assert len(clock.pauses) == failures


@pytest.mark.parametrize("tries", [1, 2, 5])
def test_the_last_of_some_tries_raises_its_error_and_is_not_told(clock: SleptClock, tries: int) -> None:
    told: list[str] = []
    with pytest.raises(OSError, match=f"try {tries}"):
        PLAIN.call(failing(99), OSError, tries=tries, failed=lambda error, _: told.append(str(error)))
    assert told == [f"try {number}" for number in range(1, tries)]
    assert clock.pauses == [1, 2, 4, 8][: tries - 1]


def test_each_failure_is_told_and_may_set_its_pause(clock: SleptClock, call: Callable[..., str]) -> None:
    told: list[int] = []

    def failed(_: Exception, pause_s: float) -> float | None:
        told.append(len(clock.pauses))
        return None if len(told) == 2 else 7.0

    assert call(failing(3, NotPermitted), failed) == "answer"
    assert told == [0, 1, 2]
    assert clock.pauses == [7, pytest.approx(0.0875, abs=0.0126), 7]


def test_an_error_of_whoever_is_told_ends_the_tries(clock: SleptClock, call: Callable[..., str]) -> None:
    def failed(*_: object) -> None:
        raise JobCancelled

    with pytest.raises(JobCancelled):
        call(failing(9, BrokerFull), failed)
    assert clock.pauses == []


def test_progress_between_two_failures_counts_from_zero(clock: SleptClock) -> None:
    streak, turns = Streak(), count(1)

    def ask() -> str:
        if (turn := next(turns)) == 7:
            return "answer"
        if turn % 2:
            streak.end()
        raise OSError

    assert PLAIN.call(ask, OSError, tries=3, streak=streak) == "answer"
    assert clock.pauses == [1, 2] * 3
    assert streak.failures == 2


def test_a_sleep_that_is_cut_ends_the_tries_with_the_last_error() -> None:
    stopping = iter([False, False, True])
    with pytest.raises(OSError, match="try 3"):
        PLAIN.call(failing(9), OSError, sleep=lambda _: next(stopping))


# Waiting for an answer


def test_the_answer_that_is_waited_for_is_asked_for_again_and_again(clock: SleptClock) -> None:
    told: list[int] = []
    assert PLAIN.until(count().__next__, (4).__eq__, waiting=lambda: told.append(len(clock.pauses))) == 4
    assert clock.pauses == [1, 2, 4, 8]
    assert told == [0, 1, 2, 3]
    assert PLAIN.until(count().__next__, (4).__eq__, tries=3) == 2  # after the last try it is what it is
    assert clock.pauses[4:] == [1, 2]


# Services


class Stopping(threading.Event):
    """Is set after so many pauses, which take no time."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self._after = after

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        if len(self.pauses) == self._after:
            self.set()
        return self.is_set()


def test_a_service_takes_step_after_step_and_each_until_it_succeeds() -> None:
    outcomes: Iterator[Exception | float | None] = iter([3.0, OSError(), ValueError(), None, OSError(), 4.0])
    stopping, told = Stopping(6), []

    def step() -> float | None:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    PLAIN.serve(step, lambda error, _: told.append(type(error)), stopping)
    assert stopping.pauses == [3, 1, 2, 0, 1, 4]
    assert told == [OSError, ValueError, OSError]


def test_a_service_that_fails_ends_when_it_is_told_to_or_whoever_is_told_raises() -> None:
    stopping = Stopping(3)
    PLAIN.serve(failing(99), lambda *_: None, stopping)  # type: ignore[arg-type]  # it never returns
    assert stopping.pauses == [1, 2, 4]

    def failed(*_: object) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        PLAIN.serve(failing(9), failed, threading.Event())  # type: ignore[arg-type]  # it never returns


# A Redis that is away or full


def test_a_full_redis_is_waited_for_as_long_as_it_takes(clock: SleptClock, call: Callable[..., str]) -> None:
    assert call(failing_until(clock, 1000 + 5 * RETRY_S, BrokerFull), RetryLimit()) == "answer"


@pytest.mark.parametrize(
    ("limit", "longest_s", "error"),
    [
        (RetryLimit, RETRY_S, BrokerUnavailable),
        (lambda: RetryLimit(longest_s=30), 30, BrokerUnavailable),
        (lambda: RetryLimit(longest_s=30, while_full=False), 30, BrokerFull),
    ],
)
def test_a_redis_that_stays_away_is_given_up(
    clock: SleptClock,
    call: Callable[..., str],
    limit: Callable[[], RetryLimit],
    longest_s: float,
    error: type[BrokerUnavailable],
) -> None:
    with pytest.raises(error, match="at 1") as raised:
        call(failing_until(clock, 9999, error), limit())
    assert longest_s <= clock.now - 1000 <= longest_s + 2
    assert str(raised.value) == f"at {clock.now:g}"


def test_only_the_time_that_it_is_away_counts(clock: SleptClock, call: Callable[..., str]) -> None:
    full_until, back_at = 1000 + 10 * RETRY_S, 1000 + 11 * RETRY_S - 5

    def ask() -> str:
        if clock.now < full_until:
            raise BrokerFull("full")
        return failing_until(clock, back_at, BrokerUnavailable)()

    assert call(ask, RetryLimit()) == "answer"


def test_what_it_refuses_each_time_is_not_asked_again(clock: SleptClock, call: Callable[..., str]) -> None:
    with pytest.raises(BrokerRefused, match="try 1"):
        call(failing(9, BrokerRefused), RetryLimit())
    assert clock.pauses == []


@pytest.mark.parametrize("error", [BrokerFull, BrokerUnavailable])
def test_a_deadline_is_a_timeout(clock: SleptClock, call: Callable[..., str], error: type[BrokerUnavailable]) -> None:
    told: list[BrokerUnavailable] = []
    with pytest.raises(WaitTimeout, match="at 1010") as raised:
        call(failing_until(clock, 2000, error), RetryLimit(1010, pausing=told.append))
    assert type(raised.value.__cause__) is error
    assert clock.now == 1010
    assert len(told) == len(clock.pauses)


def test_a_limit_goes_by_the_clock_that_it_is_given() -> None:
    limit = RetryLimit(12.0, now=iter([10.0, 11.0, 11.5, 12.0]).__next__)
    assert limit(BrokerUnavailable("away"), 9.0) == 0.5
    with pytest.raises(WaitTimeout):
        limit(BrokerUnavailable("away"), 9.0)
