"""A report: what was measured, on which machine, and what was published; as Markdown for people, JSON for programs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from embedctl_config.durable import write

#: Shown for a missing value.
NONE = "–"
#: Marks of a table's row → the words that show them.
MARKS = {"_noisy": "noisy", "_published": "other hardware"}
#: A piece of a text: code in backticks, which stays as it is, or else a `<`, which would be taken for HTML.
_MARKUP = re.compile(r"`[^`]+`|<")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        key: of the value in each row.
        digits: after the point, of a number; None shows values unchanged.
    """

    key: str
    heading: str
    digits: int | None = None

    def show(self, row: Mapping[str, object]) -> str:
        """The row's value in this column, as people read it."""
        value = row.get(self.key)
        if value is None or value != value or value == "":
            return NONE
        if isinstance(value, int | float) and self.digits is not None:
            return f"{value:,.{self.digits}f}"
        return str(value)


@dataclass(frozen=True, slots=True)
class Table:
    """A table. A column is left out where no row has a value.

    Attributes:
        name: for programs; letters, digits and dashes.
        rows: values by column key. True under `_bold` prints a row in bold; under `_noisy`, its rounds differ too much;
            under `_published`, the publisher measured it on other hardware.
        note: stands under the table. This and all other texts may hold `**bold**` and code in backticks.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, object]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All results of a benchmark.

    Attributes:
        workload: a paragraph on what was run.
        notes: a paragraph each.
        name: of the benchmark, and of the files.
        command: makes this report again.
        machine: facts by name, in the order shown; a nested mapping takes one line.
    """

    title: str
    workload: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    name: str = ""
    command: str = ""
    machine: Mapping[str, object] = field(default_factory=dict)


def write_report(report: Report, folder: Path) -> Path:
    """Write NAME.md and NAME.json; return the path of the first.

    A file is replaced as a whole, so that a reader sees the report before or this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = json.dumps(_plain(asdict(report)), indent=1, ensure_ascii=False, allow_nan=False, default=str)
    write(folder / f"{report.name}.json", f"{whole}\n".encode())
    page = folder / f"{report.name}.md"
    write(page, ("\n\n".join(_blocks(report)) + "\n").encode())
    return page


def _plain(value: object) -> object:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _blocks(report: Report) -> Iterator[str]:
    yield f"# {_escaped(report.title)}"
    yield f"Made by `{report.command}`."
    yield "## Workload"
    yield _escaped(report.workload)
    for table in report.tables:
        yield f"## {_escaped(table.title)}"
        yield _table(table)
        if table.note:
            yield _escaped(table.note)
    yield "## Machine"
    yield facts_list(report.machine)
    if report.notes:
        yield "## Notes"
        yield "\n".join(f"- {_escaped(note)}" for note in report.notes)


def facts_list(facts: Mapping[str, object]) -> str:
    """A line for each fact, as the items of a list."""
    return "\n".join(f"- {name}: {_escaped(_fact(value))}" for name, value in facts.items())


def _fact(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_fact(each)}" for name, each in value.items())
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _table(table: Table) -> str:
    columns = [each for each in table.columns if any(each.show(row) != NONE for row in table.rows)]
    rows = []
    for row in table.rows:
        cells = [column.show(row) for column in columns]
        if row.get("_bold"):
            cells = [_bold(cell) for cell in cells]
        if words := [word for mark, word in MARKS.items() if row.get(mark)]:
            cells[0] += f" *({', '.join(words)})*"
        rows.append(cells)
    return grid([each.heading for each in columns], rows, [each.digits is not None for each in columns])


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool] = ()) -> str:
    """A table of Markdown; columns of numbers are aligned on the right."""
    lines = [headings, ["---:" if right else "---" for right in numeric or [False] * len(headings)], *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|").replace("\n", " ")


def _bold(text: str) -> str:
    return f"**{text.replace('**', '')}**"


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda found: "&lt;" if found[0] == "<" else found[0], text)
