"""A clock that tests move on, for what happens only after a long time."""

from __future__ import annotations

import time

import pytest


class SleptClock:
    """Takes the place of the module `time`: time passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)


class MovedClock:
    """Takes the place of `time.monotonic`: the real clock, and what a test adds to it.

    It never waits for a slow machine: a test gives a time limit that no machine reaches, and moves the clock past it at
    the event after which the limit is to count. `eventually` looks at the same clock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monotonic = time.monotonic
        self._ahead_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self._monotonic() + self._ahead_s)

    def move(self, seconds: float) -> None:
        self._ahead_s += seconds
