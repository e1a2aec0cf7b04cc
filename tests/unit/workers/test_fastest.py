"""Choices by speed: turns, the least time, and the order where the difference is noise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from embedctl_workers.models.fastest import ROUNDS, Choice, fastest


@pytest.mark.parametrize(
    ("seconds", "name"), [((1.0, 0.98), "preferred"), ((1.0, 0.96), "other"), ((1.0, 5.0), "preferred")]
)
def test_the_order_decides_where_the_difference_is_noise(seconds: tuple[float, float], name: str) -> None:
    assert Choice.among(dict(zip(("preferred", "other"), seconds, strict=True))).name == name


def test_candidates_take_turns_and_only_the_least_time_of_each_counts() -> None:
    """Other work slows each of them down in most rounds, and the first time, which warms up, does not count."""
    now, order = 0.0, []
    slow = iter([*(0.0 for _ in range(2)), *(50.0 for _ in range(2 * (ROUNDS - 1))), 0.0, 0.0])

    def work(name: str, seconds: Iterator[float]) -> None:
        nonlocal now
        order.append(name)
        now += next(seconds) + next(slow)

    first, second = iter([0.1, *[1.0] * ROUNDS]), iter([9.0, *[0.5] * ROUNDS])
    found = fastest({"a": lambda: work("a", first), "b": lambda: work("b", second)}, clock=lambda: now)
    assert (found.name, found.seconds) == ("b", {"a": 1.0, "b": 0.5})
    assert "".join(order) == "abba" * ((1 + ROUNDS) // 2)
    assert str(found) == "b, by CPU time 0.50 of a's"
