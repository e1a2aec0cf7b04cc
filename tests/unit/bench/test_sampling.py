"""How `embedctl bench` evaluates samples, and the rounds of turns that systems take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from embedctl_bench.measuring.sampling import (
    Rounds,
    cost_per_million,
    in_rounds,
    is_noisy,
    percentiles,
    ratios,
    spread,
    turn_of,
)
from embedctl_bench.measuring.session import Session
from embedctl_config.errors import ModelError

Found = dict[str, Rounds[Mapping[str, Any]]]
Cases = Mapping[str, Callable[[], Mapping[str, Any]]]


def measured(
    folder: Path, cases: Mapping[str, Callable[[], Mapping[str, Any]]], rounds: int = 3
) -> tuple[Found, Session]:
    found: Found = {}
    with Session(folder, "grid", fresh=False, plan=100) as session:
        in_rounds(cases, rounds, session=session, key="k", into=found)
    return found, session


class Turns:
    """Cases that take the given seconds, and the order of their calls."""

    def __init__(self, **values: Iterable[float]) -> None:
        self.order: list[str] = []
        self._values: dict[str, Iterator[float]] = {name: iter(each) for name, each in values.items()}

    def cases(self) -> dict[str, Callable[[], Mapping[str, Any]]]:
        return {name: partial(self._take, name) for name in self._values}

    def _take(self, name: str) -> Mapping[str, Any]:
        self.order.append(name)
        return {"seconds": next(self._values[name])}


def counted(found: Found) -> dict[str, list[float]]:
    return {case: [run["seconds"] for run in each.counted] for case, each in found.items()}


@pytest.mark.parametrize(("per_second", "published"), [(966.409, 0.218), (1001.071, 0.211)])
def test_cost_of_a_million_is_what_was_published_at_0_758_an_hour(per_second: float, published: float) -> None:
    assert cost_per_million(per_second, 0.758) == pytest.approx(published, abs=0.001)


def test_percentiles_are_in_milliseconds_and_a_99th_needs_100_samples() -> None:
    found = percentiles([0.001 * n for n in range(1, 101)])
    assert found == pytest.approx({"p50_ms": 50.5, "p90_ms": 90.1, "p95_ms": 95.05, "p99_ms": 99.01})
    assert percentiles([0.1] * 99)["p99_ms"] is None
    assert set(percentiles([]).values()) == {None}


def test_spread_is_a_share_of_the_median() -> None:
    assert spread([10, 9, 12]) == pytest.approx(0.3)
    assert spread([10]) == 0
    assert not is_noisy([100, 105, 110])
    assert is_noisy([100, 105, 111])
    assert is_noisy([0, 0]), "rounds that say nothing are not steady"


def test_cases_take_turns_in_alternating_order(tmp_path: Path) -> None:
    turns = Turns(a=(1, 1, 1), b=(2, 2, 2))
    found, _ = measured(tmp_path, turns.cases())
    assert counted(found) == {"a": [1, 1, 1], "b": [2, 2, 2]}
    assert turns.order == ["a", "b", "b", "a", "a", "b"]
    assert [turn_of(["a", "b"], number) for number in range(2)] == [["a", "b"], ["b", "a"]]


def test_only_the_noisy_are_repeated_and_the_steadiest_rounds_count(tmp_path: Path) -> None:
    turns = Turns(steady=(10, 10, 10), noisy=(1, 1, 2, 1, 1, 1.5, 1, 1, 1.2))
    found, _ = measured(tmp_path, turns.cases())
    assert counted(found) == {"steady": [10, 10, 10], "noisy": [1, 1, 1.2]}
    assert turns.order.count("noisy") == 9


def test_a_ratio_is_of_the_rounds_in_which_both_took_a_turn(tmp_path: Path) -> None:
    # The machine has become twice as fast by the time that the noisy one is repeated.
    found, _ = measured(tmp_path, Turns(steady=(10, 10, 10), noisy=(30, 20, 33, 60, 60, 60)).cases())
    assert counted(found) == {"steady": [10, 10, 10], "noisy": [60, 60, 60]}
    noisy, steady = (found[name].each(lambda run: float(run["seconds"])) for name in ("noisy", "steady"))
    assert ratios(noisy, steady) == pytest.approx([3.0, 2.0, 3.3])
    assert ratios(Rounds([1.0], {"1": 1.0}), Rounds([1.0], {"2": 1.0})) == []


def test_a_case_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    def fails() -> Mapping[str, Any]:
        raise ModelError("no memory")

    found, session = measured(tmp_path, {"bad": fails, **Turns(good=(5, 5, 5)).cases()})
    assert counted(found) == {"bad": [], "good": [5, 5, 5]}
    assert session.notes == ["k: bad failed and is left out from here on: no memory"]
    again, later = measured(tmp_path, {"bad": fails, **Turns(good=()).cases()})
    assert (again, later.notes) == (found, session.notes)


def test_an_error_that_is_nobody_s_to_expect_passes(tmp_path: Path) -> None:
    def fails() -> Mapping[str, Any]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measured(tmp_path, {"bad": fails})


def test_whole_rounds_of_an_earlier_run_are_kept_and_a_half_one_is_measured_anew(tmp_path: Path) -> None:
    def interrupted() -> Iterator[float]:
        yield from (10.0, 10.1)
        raise KeyboardInterrupt

    seen: Found = {}
    # Rounds: a b, b a, then a and the interrupted b.
    cases = Turns(a=(1.0, 1.01, 1.02), b=interrupted()).cases()
    session = Session(tmp_path, "grid", fresh=False, plan=100)
    with pytest.raises(KeyboardInterrupt), session:
        in_rounds(cases, 3, session=session, key="k", into=seen)
    assert session.stopped
    assert counted(seen) == {"a": [1.0, 1.01], "b": [10.0, 10.1]}

    second = Turns(a=(1.03,), b=(10.2,))
    found, _ = measured(tmp_path, second.cases())
    assert counted(found) == {"a": [1.0, 1.01, 1.03], "b": [10.0, 10.1, 10.2]}
    assert second.order == ["a", "b"]
