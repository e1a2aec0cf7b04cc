"""The table of clients in docs/gateway.md: it is that of the tests."""

from __future__ import annotations

from pathlib import Path

from tests.support.clients import FAILS, marked_tests, rows_in

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"
MARKED = sorted(marked_tests())


def test_the_table_names_every_marked_test_and_none_of_them_failed() -> None:
    rows = rows_in(PAGE)
    assert {row.test for row in rows} == set(MARKED), "run `make clients-table`"
    assert len(set(MARKED)) == len(MARKED)
    assert [row for row in rows if row.result == FAILS] == []
    assert all("|" not in word for marked in MARKED for word in marked)
