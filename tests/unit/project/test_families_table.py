"""The tables of families in docs/models.md: how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.families_table import BEGIN, CLASSES, END, Cell, cells_in, cells_of, write


class Family(NamedTuple):
    name: str
    models: str
    refused: str = ""


BERT, OTHER, CODE = Family("BERT", "a, b"), Family("Other", "c"), Family("Code", "d", refused="code")


def report(family: str, hardware: str, cell: str = "", skipped: str = "") -> Any:
    properties = [("family", [family, hardware]), *([("cell", cell)] if cell else [])]
    made = pytest.TestReport("id", ("file", 1, "test"), {}, "passed", None, "call", user_properties=properties)
    if skipped:
        made.outcome, made.longrepr = "skipped", ("file", 1, f"Skipped: {skipped}")
    return made


def test_a_run_s_reports_become_cells_and_a_failure_is_the_last_word() -> None:
    cells = cells_of(
        {
            "passed": [report("BERT", "cpu", "packed, 1e-7"), pytest.CollectReport("", "passed", None, [])],
            "skipped": [report("BERT", "cpu-bf16", skipped="no bf16")],
            "failed": [report("Other", "cpu", "padded, 0.5"), report("BERT", "cpu")],
        }
    )
    assert cells == [
        Cell("BERT", "cpu", "packed, 1e-7"),
        Cell("BERT", "cpu-bf16", "not run: no bf16"),
        Cell("Other", "cpu", "**fails**"),
        Cell("BERT", "cpu", "**fails**"),
    ]


def test_what_was_not_run_keeps_its_text_and_families_that_are_gone_go(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}{END}\nafter\n")
    first = [Cell("BERT", hardware, f"packed on {hardware}") for hardware in CLASSES]
    write(page, [*first, *(Cell("Code", hardware, "no") for hardware in CLASSES)], [BERT, OTHER, CODE])
    not_run = [Cell("Other", hardware, "not run") for hardware in CLASSES]
    assert cells_in(page) == [*first, *not_run, *(Cell("Code", hardware, "no") for hardware in CLASSES)]
    write(page, [Cell("BERT", "cpu", "better"), Cell("BERT", "cpu-int8", "not run: no VNNI")], [BERT, CODE])
    assert [cell.text for cell in cells_in(page)] == ["better", *(cell.text for cell in first[1:]), "no", "no", "no"]
    text = page.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\n| family |")
    assert text.endswith(f"|\n\n{END}\nafter\n")
    assert "| Code | d | no |" in text
