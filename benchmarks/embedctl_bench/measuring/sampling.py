"""Statistics of samples: percentiles, spread, cost; and rounds of several systems by turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from embedctl_config.errors import EmbedctlError

if TYPE_CHECKING:
    from embedctl_bench.measuring.session import Session

T = TypeVar("T")
U = TypeVar("U")

#: Rounds that differ by more than this share of their median are noisy, and are repeated at most this often.
NOISY, REPEATS = 0.10, 2
#: The 99th percentile of fewer samples would be one of the two largest.
_P99_FROM = 100
_PERCENTILES = (50, 90, 95, 99)
#: What a ratio in a report is.
RATIOS = (
    "Each ratio is the median over the rounds in which both systems ran, including rounds that were later discarded "
    "for one of them."
)


@dataclass(frozen=True, slots=True)
class Rounds(Generic[T]):
    """The values of a case.

    Attributes:
        counted: the values of the set of rounds that counts, one a round.
        turns: the values of all rounds that it took part in, by the round's name, including sets that do not count.
    """

    counted: Sequence[T] = ()
    turns: Mapping[str, T] = field(default_factory=dict)

    def each(self, of: Callable[[T], U]) -> Rounds[U]:
        """Apply a function to every value."""
        return Rounds([of(value) for value in self.counted], {turn: of(value) for turn, value in self.turns.items()})


def ratios(these: Rounds[float], those: Rounds[float]) -> list[float]:
    """These figures as multiples of the others, for each round in which both systems ran.

    A noisy case is repeated alone, minutes after the others. By then the machine may have become faster or slower, so
    its figures say nothing beside theirs.
    """
    return [these.turns[turn] / those.turns[turn] for turn in these.turns if turn in those.turns]


def percentiles(samples_s: Sequence[float]) -> dict[str, float | None]:
    """`p50_ms`, `p90_ms`, `p95_ms` and `p99_ms` of durations in seconds, interpolated linearly.

    `p99_ms` is None below 100 samples; without samples all are None.
    """
    import numpy as np

    names = [f"p{each}_ms" for each in _PERCENTILES]
    if not samples_s:
        return dict.fromkeys(names)
    values = np.percentile(np.asarray(samples_s, dtype=np.float64) * 1000, _PERCENTILES)
    found: dict[str, float | None] = dict(zip(names, map(float, values), strict=True))
    if len(samples_s) < _P99_FROM:
        found["p99_ms"] = None
    return found


def spread(values: Sequence[float]) -> float:
    """The largest value minus the smallest, as a share of the median; 0 for fewer than two values, NaN for median 0."""
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    return (max(values) - min(values)) / abs(middle) if middle else math.nan


def is_noisy(values: Sequence[float]) -> bool:
    """Whether rounds differ too much for their median to say much."""
    return not spread(values) <= NOISY


def cost_per_million(per_second: float, price_per_hour: float) -> float:
    """Cost of a million items, from the rate per second and the price per hour."""
    return 1e6 / per_second * price_per_hour / 3600


def turn_of(names: Sequence[str], number: int) -> Sequence[str]:
    """The order in a round. Each round reverses it, so that a drift of the machine affects all alike."""
    return names[:: -1 if number % 2 else 1]


def in_rounds(
    cases: Mapping[str, Callable[[], Mapping[str, Any]]],
    rounds: int,
    *,
    session: Session,
    key: str,
    into: dict[str, Rounds[Mapping[str, Any]]],
    repeats: int = REPEATS,
) -> None:
    """Measure each case once a round, by turns.

    Noisy cases go through the same number of rounds again, at most `repeats` times. The set of rounds with the least
    spread counts. Every round is a step of the session, so it never mixes runs. A case that fails is left out from then
    on, with a note in the session.

    Args:
        cases: each returns a run as JSON, whose `seconds` count.
        key: the beginning of the keys of the session's steps; different for each call.
        into: the values by case; filled as rounds end, so that the caller has them after Ctrl-C.
    """
    into.update({case: Rounds() for case in cases})
    alive = list(cases)
    sets: dict[str, list[dict[str, Mapping[str, Any]]]] = {case: [] for case in cases}
    for attempt in range(1 + repeats):
        again = [case for case in alive if not attempt or is_noisy(_seconds(into[case].counted))]
        if attempt:
            session.more(rounds if again else 0)
        for case in again:
            sets[case].append({})
        for number in range(rounds if again else 0):
            turn = f"{number + 1}" + (f" again {attempt}" if attempt else "")
            order = turn_of([case for case in again if case in alive], number)
            values = session.step(f"{key}/{turn}", partial(_round, cases, order, session), needs=order)
            for case in order:
                value = values[case]
                if "failed" in value:
                    alive.remove(case)
                    session.note(f"{key}: {case} failed and is left out from here on: {value['failed']}")
                    continue
                sets[case][-1][turn] = value
                most = max(map(len, sets[case]))  # an incomplete set counts only if it is the first
                whole = [list(each.values()) for each in sets[case] if len(each) == most]
                turns = {turn: value for each in sets[case] for turn, value in each.items()}
                into[case] = Rounds(min(whole, key=lambda each: spread(_seconds(each))), turns)


def _round(
    cases: Mapping[str, Callable[[], Mapping[str, Any]]], order: Sequence[str], session: Session
) -> dict[str, Mapping[str, Any]]:
    """Measure cases one after the other; of those that fail, the reason."""
    values: dict[str, Mapping[str, Any]] = {}
    for case in order:
        try:
            values[case] = cases[case]()
            session.say(f"  {case}: {values[case]['seconds']:.4g} s")
        except EmbedctlError as error:
            values[case] = {"failed": str(error) or type(error).__name__}
    return values


def _seconds(runs: Iterable[Mapping[str, Any]]) -> list[float]:
    return [float(run["seconds"]) for run in runs]
