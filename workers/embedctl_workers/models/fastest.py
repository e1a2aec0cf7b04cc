"""Every choice by speed: candidates by turns, by the CPU time of one thread, which other work hardly changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: A run returns the seconds that it took.
Run = Callable[[], float]

#: Rounds of a series, at least and at most. While other work took both CPUs, the least times of 7 rounds were off by up
#: to a tenth, and those of 28 by up to 4 %.
ROUNDS, MOST_ROUNDS = 7, 28
#: Who takes longer than the fastest by this factor after the least number of rounds is out.
_OUT = 1.1
#: A smaller ratio than this is noise, and the order of the candidates decides.
_CLEARLY = 1.03


@dataclass(frozen=True, slots=True)
class Choice:
    """Which candidate was chosen, and the seconds of all by name; the one that is preferred comes first."""

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


def timed(run: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> Run:
    """All of the work is done in this thread, unless the clock counts others' too."""

    def seconds() -> float:
        began = clock()
        run()
        return clock() - began

    return seconds


def fastest(candidates: Mapping[str, Sequence[Run]]) -> Choice:
    """Time the candidates, at least one, in order of preference; each is the sum of its runs, by the least of each.

    Another than the first one is chosen only if it wins twice.
    """
    choice = _series(candidates)
    names = list(candidates)
    return (
        choice if choice.name == names[0] else min(choice, _series(candidates), key=lambda each: names.index(each.name))
    )


def _series(candidates: Mapping[str, Sequence[Run]]) -> Choice:
    """Each runs once before, because the first time is another one.

    The order changes each round, because caches favour the next one.
    """
    left = list(candidates)
    rounds = ROUNDS if len(left) > 1 else 1  # one alone is compared with nobody
    least = {name: [float("inf")] * len(runs) for name, runs in candidates.items()}
    seconds: dict[str, float] = {}
    for turn in range(1 + MOST_ROUNDS):
        for name in left[:: -1 if turn % 2 else 1]:
            times = [run() for run in candidates[name]]
            least[name] = [*map(min, least[name], times)] if turn else least[name]
        seconds = {name: sum(each) for name, each in least.items()}
        if turn >= rounds:
            left = [name for name in left if seconds[name] <= min(seconds.values()) * _OUT]
        if len(left) == 1 and turn >= rounds:
            break
    return Choice.among(seconds)
