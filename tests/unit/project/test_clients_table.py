"""The table of clients in docs/gateway.md: it is that of the tests, and how it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import BEGIN, END, FAILS, Row, marked_tests, rows_in, rows_of, write

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"
MARKED = sorted(marked_tests())
#: Two that there are.
ONE, OTHER = MARKED[0], MARKED[-1]


def report(of: tuple[str, str], skipped: str = "", version: str = "") -> Any:
    properties = [("client", list(of)), *([("version", version)] if version else [])]
    made = pytest.TestReport("id", ("file", 1, "test"), {}, "passed", None, "call", user_properties=properties)
    if skipped:
        made.outcome, made.longrepr = "skipped", ("file", 1, f"Skipped: {skipped}")
    return made


def test_the_table_names_every_marked_test_and_none_of_them_failed() -> None:
    rows = rows_in(PAGE)
    assert {row.test for row in rows} == set(MARKED), "run `make clients-table`"
    assert len(set(MARKED)) == len(MARKED)
    assert [row for row in rows if row.result == FAILS] == []
    assert all("|" not in word for marked in MARKED for word in marked)


def test_a_run_s_reports_become_rows() -> None:
    rows = rows_of(
        {
            "passed": [
                report(ONE, version="1.2"),
                report(("pytest", "tests")),
                pytest.CollectReport("", "passed", None, []),
            ],
            "skipped": [report(OTHER, skipped="it is not here")],
            "failed": [report(ONE, version="1.3")],
        }
    )
    assert rows == [
        Row(*ONE[:1], "1.3", ONE[1], "**fails**"),
        Row("pytest", pytest.__version__, "tests", "works"),
        Row(OTHER[0], "", OTHER[1], "not run: it is not here"),
    ]


def test_rows_of_other_runs_stay_and_newer_ones_of_a_major_version_replace_older_ones(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}{END}\nafter\n")
    gone = Row("nobody", "1", "nothing", "works")
    write(page, [Row(OTHER[0], "", OTHER[1], "not run: why"), Row(ONE[0], "1.0.0", ONE[1], "works"), gone])
    assert rows_in(page) == [Row(ONE[0], "1.0.0", ONE[1], "works"), Row(OTHER[0], "", OTHER[1], "not run: why")]
    write(page, [Row(OTHER[0], "4.0", OTHER[1], "works"), Row(ONE[0], "", ONE[1], FAILS)])
    write(page, [Row(ONE[0], "3.0", ONE[1], "works")])
    write(page, [Row(OTHER[0], "", OTHER[1], "not run: why"), Row(ONE[0], "3.1", ONE[1], "works")])
    assert rows_in(page) == [
        Row(ONE[0], "1.0.0", ONE[1], "works"),
        Row(ONE[0], "3.1", ONE[1], "works"),
        Row(OTHER[0], "4.0", OTHER[1], "works"),
    ]
    text = page.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\n| client |")
    assert text.endswith(f"|\n\n{END}\nafter\n")
