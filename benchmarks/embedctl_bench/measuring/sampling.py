"""What is made of samples: percentiles, spread, cost; and the rounds in which several systems take turns."""

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

#: Rounds that differ by a larger share of their median are noisy, and measured again so many times.
NOISY, REPEATS = 0.10, 2
#: A 99th percentile of fewer samples is one of the largest two, and no percentile.
_P99_FROM = 100
_PERCENTILES = (50, 90, 95, 99)
#: Of the ratios in a report, for people.
RATIOS = "A ratio is the median of those of the rounds in which both took a turn, whichever rounds count for each."


@dataclass(frozen=True, slots=True)
class Rounds(Generic[T]):
    """What a case came to.

    Attributes:
        counted: the values of the set of rounds that counts, one a round.
        turns: those of every round it took part in, by the round's name; of sets that do not count too.
    """

    counted: Sequence[T] = ()
    turns: Mapping[str, T] = field(default_factory=dict)

    def each(self, of: Callable[[T], U]) -> Rounds[U]:
        """Something of every value."""
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
    """Of durations in seconds: `min`, `max`, `avg`, `p50`, `p90`, `p95` and `p99`, in milliseconds.

    Percentiles lie between samples where they have to (numpy's linear method). `p99` is None below 100 samples, and all
    are None without any.
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
    """How much rounds differ: largest less least, as a share of the median; 0 for fewer than two. NaN if that is 0."""
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    return (max(values) - min(values)) / abs(middle) if middle else math.nan


def is_noisy(values: Sequence[float]) -> bool:
    """Whether rounds differ by so much that their median says little."""
    return not spread(values) <= NOISY


def cost_per_million(per_second: float, price_per_hour: float) -> float:
    """What a million of something costs that a machine makes so many of in a second, in the price's currency."""
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
    """Measure each case once a round, in an order that is turned round every time, so that a drift touches all alike.

    Those that come out noisy go through as many rounds again, at most `repeats` times; of a case's sets of rounds the
    one with the least spread counts, and the session notes it. Every measurement is a step of the session; a round that
    an earlier run left half done is measured anew, so that a round is always of one run. A case that fails is left out
    from then on, which the session notes too.

    Args:
        key: what begins the keys of the session's steps; another one for each call.
        into: filled as rounds end, for those who want what there is after Ctrl-C.
        lost_by: what a case raises that can't be measured any more.
        figure: what counts of what a case returns, where that is more than a number.
        tell: gets what would be noted of noisy cases, where they may be too many for a report.

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
            session.more((len(values) - len(order)) * (rounds - number))  # those that failed come no more
            for case, value in values.items():
                sets[case][-1][turn] = value
                most = max(map(len, sets[case]))  # a set half measured counts if it is the first
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
    """Measure cases one after the other; those that fail are taken out of those alive."""
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
