"""Asking a Redis that went away, or is full, until it answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embedctl import patience
from embedctl.patience import OUTAGE_S, patiently
from embedctl_config.errors import BrokerFull, BrokerUnavailable, JobCancelled, WaitTimeout


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    return clock


def failing_until(clock: Clock, time: float, error: type[Exception]) -> Callable[[], str]:
    def ask() -> str:
        if clock.now < time:
            raise error(f"at {clock.now:g}")
        return "answer"

    return ask


def test_an_answer_comes_back_at_once(clock: Clock) -> None:
    assert patiently(lambda: "answer", pausing=lambda error: pytest.fail(str(error))) == "answer"
    assert clock.pauses == []


def test_a_full_redis_is_waited_for_as_long_as_it_takes(clock: Clock) -> None:
    assert patiently(failing_until(clock, 1000 + 100 * OUTAGE_S, BrokerFull)) == "answer"


def test_a_redis_that_comes_back_in_time_is_asked_again(clock: Clock) -> None:
    assert patiently(failing_until(clock, 1000 + OUTAGE_S - 1, BrokerUnavailable)) == "answer"


def test_a_redis_that_stays_away_is_given_up(clock: Clock) -> None:
    with pytest.raises(BrokerUnavailable, match="at 1") as raised:
        patiently(failing_until(clock, 1000 + 2 * OUTAGE_S, BrokerUnavailable))
    assert OUTAGE_S < clock.now - 1000 < OUTAGE_S + 5
    assert str(raised.value) == f"at {clock.now:g}"


def test_only_the_time_that_it_is_away_counts(clock: Clock) -> None:
    full_until, back_at = 1000 + 10 * OUTAGE_S, 1000 + 11 * OUTAGE_S - 5

    def ask() -> str:
        if clock.now < full_until:
            raise BrokerFull("full")
        return failing_until(clock, back_at, BrokerUnavailable)()

    assert patiently(ask) == "answer"


def test_pauses_grow_up_to_two_seconds_and_each_is_told_before(clock: Clock) -> None:
    told: list[int] = []
    patiently(failing_until(clock, 1030, BrokerUnavailable), pausing=lambda error: told.append(len(clock.pauses)))
    assert clock.pauses == sorted(clock.pauses)
    assert clock.pauses[0] == 0.1
    assert clock.pauses[-1] == 2.0
    assert told == list(range(len(clock.pauses)))


@pytest.mark.parametrize("error", [BrokerFull, BrokerUnavailable])
def test_a_deadline_ends_the_wait_as_a_timeout(clock: Clock, error: type[Exception]) -> None:
    with pytest.raises(WaitTimeout, match="at 1010") as raised:
        patiently(failing_until(clock, 2000, error), deadline=1010)
    assert type(raised.value.__cause__) is error
    assert clock.now == 1010


def test_a_question_is_asked_once_even_after_the_deadline(clock: Clock) -> None:
    assert patiently(lambda: "answer", deadline=clock.now - 1) == "answer"


@pytest.mark.parametrize("error", [JobCancelled, ValueError, KeyboardInterrupt])
def test_other_errors_leave_at_once(clock: Clock, error: type[BaseException]) -> None:
    def ask() -> None:
        raise error

    with pytest.raises(error):
        patiently(ask)
    assert clock.pauses == []


def test_an_error_of_whoever_is_told_ends_the_wait(clock: Clock) -> None:
    def pausing(error: BrokerUnavailable) -> None:
        raise JobCancelled

    with pytest.raises(JobCancelled):
        patiently(failing_until(clock, 2000, BrokerFull), pausing=pausing)
    assert clock.pauses == []
