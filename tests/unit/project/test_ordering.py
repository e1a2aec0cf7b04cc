"""The longest tests begin first in every process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.ordering import ordered


def item(name: str, limit_s: float = 0) -> Any:
    mark = SimpleNamespace(args=(limit_s,)) if limit_s else None
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: mark)


def test_each_process_begins_with_long_tests_and_modules_stay_together() -> None:
    items = [item("a::1"), item("a::2", 300), item("b::1"), item("b::2"), item("c::1", 400), item("c::2", 400)]
    items += [item("d::1", 600), *(item(f"e::{number}") for number in range(5))]
    names = [each.nodeid for each in ordered(items, 3)]
    assert [names[:4], names[4:8], names[8:]] == [
        ["c::1", "c::2", "a::1", "b::1"],
        ["d::1", "b::2", "e::0", "e::1"],
        ["a::2", "e::2", "e::3", "e::4"],
    ]


def test_no_test_is_left_out_where_a_module_is_larger_than_a_part() -> None:
    items = [item(f"a::{number}", 100) for number in range(5)] + [item("b::1"), item("b::2")]
    assert sorted(each.nodeid for each in ordered(items, 3)) == sorted(each.nodeid for each in items)
    assert ordered([], 3) == []
