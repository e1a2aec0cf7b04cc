"""How `embedctl bench` evaluates samples, and the rounds of turns that systems take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from embedctl_bench.measuring.sampling import Rounds, cost_per_million, in_rounds, is_noisy, percentiles, spread, times
from embedctl_bench.measuring.session import Session
from embedctl_config.errors import ModelError


def session_in(folder: Path, *, fresh: bool = False) -> Session:
    return Session(folder, "study", fresh=fresh, plan=100)


class Turns:
    """Cases that return the given values, and the order of their calls."""

    def __init__(self, **values: Iterable[float]) -> None:
        self.order: list[str] = []
        self._values: dict[str, Iterator[float]] = {name: iter(each) for name, each in values.items()}

    def cases(self) -> dict[str, Callable[[], float]]:
        return {name: partial(self._take, name) for name in self._values}

    def _take(self, name: str) -> float:
        self.order.append(name)
        return next(self._values[name])


def counted(found: dict[str, Rounds[float]]) -> dict[str, list[float]]:
    return {case: list(each.counted) for case, each in found.items()}


@pytest.mark.parametrize(("per_second", "published"), [(966.409, 0.218), (1001.071, 0.211)])
def test_cost_of_a_million_is_what_was_published_at_0_758_an_hour(per_second: float, published: float) -> None:
    assert cost_per_million(per_second, 0.758) == pytest.approx(published, abs=0.001)


def test_percentiles_are_in_milliseconds_and_lie_between_samples() -> None:
    found = percentiles([0.001 * n for n in range(1, 101)])
    assert found == pytest.approx(
        {"min": 1, "max": 100, "avg": 50.5, "p50": 50.5, "p90": 90.1, "p95": 95.05, "p99": 99.01}
    )


def test_there_is_no_99th_percentile_of_99_samples() -> None:
    assert percentiles([0.1] * 99)["p99"] is None
    assert percentiles([0.1] * 100)["p99"] == pytest.approx(100)


def test_there_are_no_percentiles_of_nothing() -> None:
    assert set(percentiles([]).values()) == {None}


def test_spread_is_a_share_of_the_median() -> None:
    assert spread([10, 9, 12]) == pytest.approx(0.3)
    assert spread([10]) == 0
    assert not is_noisy([100, 105, 110])
    assert is_noisy([100, 105, 111])
    assert is_noisy([0, 0]), "rounds that say nothing are not steady"


def test_cases_take_turns_in_alternating_order(tmp_path: Path) -> None:
    turns = Turns(a=(1, 1, 1), b=(2, 2, 2))
    with session_in(tmp_path) as session:
        found = in_rounds(turns.cases(), 3, session=session, key="k")
    assert counted(found) == {"a": [1, 1, 1], "b": [2, 2, 2]}
    assert turns.order == ["a", "b", "b", "a", "a", "b"]


def test_only_the_noisy_are_repeated_and_the_steadiest_rounds_count(tmp_path: Path) -> None:
    turns = Turns(steady=(10, 10, 10), noisy=(1, 1, 2, 1, 1, 1.5, 1, 1, 1.2))
    with session_in(tmp_path) as session:
        found = in_rounds(turns.cases(), 3, session=session, key="k")
    assert counted(found) == {"steady": [10, 10, 10], "noisy": [1, 1, 1.2]}
    assert turns.order.count("noisy") == 9
    assert session.notes == ["k: noisy was noisy and repeated; spreads 100%, 50%, 20%, the least counts"]


def test_a_ratio_is_of_the_rounds_in_which_both_took_a_turn(tmp_path: Path) -> None:
    # The machine has become twice as fast by the time that the noisy one is repeated.
    turns = Turns(steady=(10, 10, 10), noisy=(30, 20, 33, 60, 60, 60))
    with session_in(tmp_path) as session:
        found = in_rounds(turns.cases(), 3, session=session, key="k")
    assert counted(found) == {"steady": [10, 10, 10], "noisy": [60, 60, 60]}
    assert times(found["noisy"], found["steady"]) == pytest.approx(3.0)
    assert times(found["steady"], found["noisy"]) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="median"):
        times(Rounds([1.0], {"1": 1.0}), Rounds([1.0], {"2": 1.0}))


def test_no_more_is_repeated_once_rounds_are_steady(tmp_path: Path) -> None:
    turns = Turns(a=(1, 2, 1, 1))
    with session_in(tmp_path) as session:
        assert counted(in_rounds(turns.cases(), 2, session=session, key="k")) == {"a": [1, 1]}


def test_a_case_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    def fails() -> float:
        raise ModelError("no memory")

    turns = Turns(good=(5, 5, 5))
    with session_in(tmp_path) as session:
        found = in_rounds({"bad": fails, **turns.cases()}, 3, session=session, key="k")
    assert counted(found) == {"bad": [], "good": [5, 5, 5]}
    assert session.notes == ["k/1: bad failed and is left out from here on: no memory"]
    with session_in(tmp_path) as again:
        assert in_rounds({"bad": fails, **Turns(good=()).cases()}, 3, session=again, key="k") == found
    assert again.notes == session.notes


def test_an_error_that_is_nobody_s_to_expect_passes(tmp_path: Path) -> None:
    def fails() -> float:
        raise ZeroDivisionError

    with session_in(tmp_path) as session, pytest.raises(ZeroDivisionError):
        in_rounds({"bad": fails}, 3, session=session, key="k")


def test_whole_rounds_of_an_earlier_run_are_kept_and_a_half_one_is_measured_anew(tmp_path: Path) -> None:
    def interrupted() -> Iterator[float]:
        yield from (10.0, 10.1)
        raise KeyboardInterrupt

    seen: dict[str, Rounds[float]] = {}
    first = Turns(a=(1.0, 1.01), b=interrupted())
    first_cases = first.cases()
    with session_in(tmp_path) as session, pytest.raises(KeyboardInterrupt):
        # Rounds: a b, b a, then a and the interrupted b.
        in_rounds(first_cases | {"a": iter((1.0, 1.01, 1.02)).__next__}, 3, session=session, key="k", into=seen)
    assert session.stopped
    assert counted(seen) == {"a": [1.0, 1.01], "b": [10.0, 10.1]}

    second = Turns(a=(1.03,), b=(10.2,))
    with session_in(tmp_path) as session:
        found = in_rounds(second.cases(), 3, session=session, key="k")
    assert counted(found) == {"a": [1.0, 1.01, 1.03], "b": [10.0, 10.1, 10.2]}
    assert second.order == ["a", "b"]
