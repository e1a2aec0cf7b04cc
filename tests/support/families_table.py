"""The tables in docs/models.md of families of models, from the tests marked `family`.

Such a test has the parameters `family` and `hardware`, and records the property `cell`. With `--families-table FILE`, a
run writes its results into FILE, and leaves there what tests that it skipped have written before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

OPTION = "--families-table"
BEGIN = "<!-- Written by `make families-table`: changes made here are overwritten. -->\n"
END = "<!-- The end of what `make families-table` writes. -->\n"
CLASSES = ("cpu", "cpu-bf16", "cpu-int8")
FAILS, NOT_RUN = "**fails**", "not run: "
_FAMILY, _CELL = "family", "cell"


class Named(Protocol):
    """What the table says of a family beside its results."""

    @property
    def name(self) -> str: ...
    @property
    def models(self) -> str: ...
    @property
    def refused(self) -> str: ...


class Cell(NamedTuple):
    """A result: what a class does with a family."""

    family: str
    hardware: str
    text: str


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker(_FAMILY) is not None and isinstance(item, pytest.Function):
        of: dict[str, Any] = item.callspec.params
        item.user_properties.append((_FAMILY, [of["family"].name, of["hardware"]]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if file := config.getoption(OPTION):
        from tests.support.model_families import FAMILIES

        write(Path(file), cells_of(terminalreporter.stats), FAMILIES)


def cells_of(stats: Mapping[str, Sequence[object]]) -> list[Cell]:
    """The cells of the tests that a run had, by their reports."""
    found = []
    for outcome in ("passed", "skipped", "failed", "error"):  # a failure is the last word
        for report in stats.get(outcome, []):
            if isinstance(report, pytest.TestReport):
                properties: dict[str, Any] = dict(report.user_properties)
                if _FAMILY in properties:
                    family, hardware = properties[_FAMILY]
                    found.append(Cell(family, hardware, _text(report, outcome, properties.get(_CELL))))
    return found


def _text(report: pytest.TestReport, outcome: str, cell: object) -> str:
    if outcome == "skipped":
        assert isinstance(report.longrepr, tuple)
        return NOT_RUN + report.longrepr[2].removeprefix("Skipped: ")
    return str(cell) if outcome == "passed" else FAILS


def write(file: Path, cells: Sequence[Cell], families: Sequence[Named]) -> None:
    """Put cells into the tables of a page. A cell that was not run keeps its last text; families that are gone go."""
    before, _, rest = file.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    known = {cell[:2]: cell.text for cell in cells_in(file)}
    for cell in cells:
        if not cell.text.startswith(NOT_RUN) or cell[:2] not in known:
            known[cell[:2]] = cell.text
    text = _tables(known, families)
    file.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", "utf-8")


def _tables(cells: Mapping[tuple[str, str], str], families: Sequence[Named]) -> str:
    encoded = [["family", "models, for example", *(f"`{hardware}`" for hardware in CLASSES)], ["---"] * 5]
    refused = [["family", "models, for example", "each class says"], ["---"] * 3]
    for family in families:
        found = [cells.get((family.name, hardware), NOT_RUN.rstrip(": ")) for hardware in CLASSES]
        if family.refused:
            refused.append([family.name, family.models, found[0]])
        else:
            encoded.append([family.name, family.models, *found])
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in table) for table in (encoded, refused)) + "\n"


def cells_in(file: Path) -> list[Cell]:
    """The cells of the tables of a page."""
    found = []
    for line in file.read_text("utf-8").partition(BEGIN)[2].partition(END)[0].splitlines():
        family, _, *texts = [part.strip() for part in line.strip("|").split("|")] if line.count("|") > 3 else ("", "")
        if family not in ("", "family", "---"):
            texts = texts * len(CLASSES) if len(texts) == 1 else texts
            found += [Cell(family, hardware, text) for hardware, text in zip(CLASSES, texts, strict=True)]
    return found
