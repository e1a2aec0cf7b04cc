"""Statistics of samples: percentiles, spread, cost; and rounds of several systems by turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


def times(these: Rounds[float], those: Rounds[float]) -> float:
    """The median of :func:`ratios`.

    Raises:
        ValueError: there is no round in which both ran.
    """
    return statistics.median(ratios(these, those))


def percentiles(samples_s: Sequence[float]) -> dict[str, float | None]:
    """`min`, `max`, `avg`, `p50`, `p90`, `p95` and `p99` of durations in seconds, in milliseconds.

    Percentiles are interpolated linearly. `p99` is None below 100 samples; without samples all are None.
    """
    import numpy as np

    names = [f"p{each}" for each in _PERCENTILES]
    if not samples_s:
        return dict.fromkeys(["min", "max", "avg", *names])
    ms = np.asarray(samples_s, dtype=np.float64) * 1000
    found: dict[str, float | None] = {"min": float(ms.min()), "max": float(ms.max()), "avg": float(ms.mean())}
    found |= dict(zip(names, map(float, np.percentile(ms, _PERCENTILES)), strict=True))
    if len(samples_s) < _P99_FROM:
        found["p99"] = None
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


def in_rounds(
    cases: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    session: Session,
    key: str,
    into: dict[str, Rounds[T]] | None = None,
    lost_by: tuple[type[Exception], ...] = (EmbedctlError,),
    figure: Callable[[Any], float] = float,
    repeats: int = REPEATS,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Rounds[T]]:
    """Measure each case once a round. Each round reverses the order, so that a drift of the machine affects all alike.

    Noisy cases go through the same number of rounds again, at most `repeats` times. The set of rounds with the least
    spread counts, and the session notes it. Every measurement is a step of the session. A round that an earlier run
    left half done is measured again, so that a round never mixes runs. A case that fails is left out from then on, with
    a note in the session.

    Args:
        key: the beginning of the keys of the session's steps; different for each call.
        into: filled as rounds end, so that the caller has the values after Ctrl-C.
        lost_by: the errors of a case that can't be measured any more.
        figure: the number that counts, taken from what a case returns.
        tell: gets the notes on noisy cases instead of the session.

    Returns:
        Values by case, one a round; fewer, or none, for a case that failed.
    """
    results: dict[str, Rounds[T]] = into if into is not None else {}
    results.update({case: Rounds() for case in cases})
    alive = dict(cases)
    sets: dict[str, list[dict[str, T]]] = {case: [] for case in cases}

    def spread_of(values: Iterable[T]) -> float:
        return spread([figure(value) for value in values])

    for attempt in range(1 + repeats):
        again = [case for case in alive if not attempt or is_noisy([figure(value) for value in results[case].counted])]
        if attempt:
            session.more(rounds * len(again))
        for case in again:
            sets[case].append({})
        for number in range(rounds):
            turn = f"{number + 1}" + (f" again {attempt}" if attempt else "")
            order = [case for case in again if case in alive]
            values = _round(alive, order[:: -1 if number % 2 else 1], session, f"{key}/{turn}", lost_by)
            session.more((len(values) - len(order)) * (rounds - number))  # a case that failed gets no further turn
            for case, value in values.items():
                sets[case][-1][turn] = value
                most = max(map(len, sets[case]))  # an incomplete set counts only if it is the first
                whole = [list(each.values()) for each in sets[case] if len(each) == most]
                turns = {turn: value for each in sets[case] for turn, value in each.items()}
                results[case] = Rounds(min(whole, key=spread_of), turns)
    for case, found in sets.items():
        if len(found) > 1:
            each = ", ".join(f"{spread_of(values.values()):.0%}" for values in found if len(values) == rounds)
            (tell or session.note)(f"{key}: {case} was noisy and repeated; spreads {each}, the least counts")
    return results


def _round(
    alive: dict[str, Callable[[], T]],
    order: Sequence[str],
    session: Session,
    prefix: str,
    lost_by: tuple[type[Exception], ...],
) -> dict[str, T]:
    """Measure cases one after the other; remove those that fail from `alive`."""
    steps = {case: f"{prefix}/{case}" for case in order}
    session.drop_unless_all_kept(steps.values())
    values = {}
    for case, step in steps.items():
        failure = session.failure(step)
        if not failure:
            try:
                values[case] = session.step(step, alive[case])
                continue
            except lost_by as error:
                failure = str(error) or type(error).__name__
                session.fail(step, failure)
        del alive[case]
        session.note(f"{prefix}: {case} failed and is left out from here on: {failure}")
    return values
