"""Choices by speed: turns, the least time of each run, who is out, and the order where the difference is noise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from embedctl_workers.models.fastest import MOST_ROUNDS, ROUNDS, Choice, fastest, timed


@pytest.mark.parametrize(
    ("seconds", "name"), [((1.0, 0.98), "preferred"), ((1.0, 0.96), "other"), ((1.0, 5.0), "preferred")]
)
def test_the_order_decides_where_the_difference_is_noise(seconds: tuple[float, float], name: str) -> None:
    assert Choice.among(dict(zip(("preferred", "other"), seconds, strict=True))).name == name


class Made:
    """Candidates with made-up times; `order` tells who ran."""

    def __init__(self) -> None:
        self.order = ""

    def run(self, name: str, *seconds: float, then: float) -> Iterator[float]:
        for each in chain(seconds, repeat(then)):
            self.order += name
            yield each


def test_candidates_take_turns_and_the_least_time_of_each_run_counts() -> None:
    """Other work slows each run of `a` down in all rounds but one, and the warm-up does not count."""
    made = Made()
    first = made.run("a", 0.1, 9.0, 0.5, then=9.0)
    second = made.run("a", 0.1, *[0.55] * (MOST_ROUNDS - 1), then=0.5)
    others = {name: [made.run(name, then=seconds).__next__] for name, seconds in (("b", 1.0), ("c", 20.0))}
    found = fastest({"a": [first.__next__, second.__next__], **others})
    assert (found.name, found.seconds) == ("a", {"a": 1.0, "b": 1.0, "c": 20.0})
    assert made.order.startswith("aabc" + "cbaa" + "aabc")
    assert str(found) == "a, by CPU time 1.00 of b's, 0.05 of c's"


def test_who_is_far_behind_is_out_and_the_close_ones_go_on() -> None:
    made = Made()
    fastest(
        {
            "a": [made.run("a", then=1.0).__next__],
            "b": [made.run("b", then=1.05).__next__],
            "c": [made.run("c", then=1.2).__next__],
        }
    )
    assert [made.order.count(each) for each in "abc"] == [1 + MOST_ROUNDS, 1 + MOST_ROUNDS, 1 + ROUNDS]
    made = Made()
    fastest({"a": [made.run("a", then=1.0).__next__], "b": [made.run("b", then=2.0).__next__]})
    assert len(made.order) == 2 * (1 + ROUNDS)


def test_one_alone_is_compared_with_nobody() -> None:
    made = Made()
    assert fastest({"a": [made.run("a", then=1.0).__next__]}) == Choice("a", {"a": 1.0})
    assert made.order == "aa"


@pytest.mark.parametrize(("again", "name"), [(0.5, "b"), (1.0, "a")])
def test_another_than_the_preferred_one_must_win_twice(again: float, name: str) -> None:
    made = Made()
    a, b = made.run("a", then=1.0), made.run("b", *[0.5] * (1 + ROUNDS), then=again)
    assert fastest({"a": [a.__next__], "b": [b.__next__]}).name == name


def test_a_run_takes_the_time_by_the_clock() -> None:
    clock = iter([3.0, 5.5])
    assert timed(lambda: None, lambda: next(clock))() == 2.5
