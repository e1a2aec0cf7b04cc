"""No test is lost where the longest ones begin first in every process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.ordering import ordered


def item(name: str, limit_s: float = 0) -> Any:
    mark = SimpleNamespace(args=(limit_s,)) if limit_s else None
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: mark)


def test_no_test_is_left_out_where_a_module_is_larger_than_a_part() -> None:
    items = [item(f"a::{number}", 100) for number in range(5)] + [item("b::1"), item("b::2")]
    assert sorted(each.nodeid for each in ordered(items, 3)) == sorted(each.nodeid for each in items)
    assert ordered([], 3) == []
