"""Every choice by speed: candidates by turns, by the CPU time of one thread, which other work hardly changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

#: A candidate's time is its least of these rounds. The order changes each round, because caches favour the next one.
ROUNDS = 7
#: A smaller ratio than this is noise, and the order of the candidates decides.
_CLEARLY = 1.03


@dataclass(frozen=True, slots=True)
class Choice:
    """Which candidate was chosen, and seconds of CPU time of all by name; the one that is preferred comes first."""

    name: str
    seconds: Mapping[str, float]

    @classmethod
    def among(cls, seconds: Mapping[str, float]) -> Choice:
        """The first of the candidates that no other one clearly beats."""
        least = min(seconds.values())
        return cls(next(name for name, each in seconds.items() if each <= least * _CLEARLY), seconds)

    def __str__(self) -> str:
        own = self.seconds[self.name]
        others = [f"{own / each:.2f} of {name}'s" for name, each in self.seconds.items() if name != self.name]
        return f"{self.name}, by CPU time {', '.join(others)}" if others else self.name


def fastest(candidates: Mapping[str, Callable[[], object]], *, clock: Callable[[], float] = time.thread_time) -> Choice:
    """Time the candidates, at least one, in order of preference. All of their work is done in this thread.

    Each runs once before, because the first time is another one.
    """
    seconds = dict.fromkeys(candidates, float("inf"))
    for turn in range(1 + ROUNDS):
        for name in _turned(list(candidates), turn):
            began = clock()
            candidates[name]()
            if turn:
                seconds[name] = min(seconds[name], clock() - began)
    return Choice.among(seconds)


def _turned(names: list[T], turn: int) -> Iterable[T]:
    return names if turn % 2 == 0 else reversed(names)
