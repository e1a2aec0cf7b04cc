"""A report as files: Markdown, ready to paste, and JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from embedctl_bench.report.report import MARKS, Claim, Column, Report, Table

#: A piece of a text: code in backticks, which stays as it is, or else a `<`, which would be taken for HTML.
_MARKUP = re.compile(r"`[^`]+`|<")


def write_report(report: Report, folder: Path) -> Path:
    """Write NAME.md and NAME.json; return the path of the first.

    A file is replaced as a whole, so that a reader sees the report before or this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replaced(folder / f"{report.name}.json", document(report))
    return replaced(folder / f"{report.name}.md", page(report))


def replaced(path: Path, text: str) -> Path:
    """The file with this text, which had another text or none until now."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(path)


def document(report: Report) -> str:
    """The report's fields by name, as JSON. NaN and infinity become null."""
    return json.dumps(_plain(asdict(report)), indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _plain(value: object) -> object:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def page(report: Report) -> str:
    """The whole page, as Markdown."""
    return "\n\n".join(_blocks(report)) + "\n"


def _blocks(report: Report) -> Iterator[str]:
    yield f"# {_escaped(report.title)}"
    yield f"Made by `{report.command}`."
    if report.claims:
        yield "## What was published, and what was measured here"
        yield _claims(report.claims)
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


def _claims(claims: Sequence[Claim]) -> str:
    rows = [
        [
            claim.what,
            claim.published,
            claim.ours if claim.met else _bold(claim.ours),
            "yes" if claim.met else "**no**",
            claim.why,
        ]
        for claim in claims
    ]
    return grid(["claim", "published, on other hardware", "here", "met", "why"], rows)


def _table(table: Table) -> str:
    rows = []
    for row in table.rows:
        cells = [column.show(row) for column in table.columns]
        if row.get("_bold"):
            cells = [_bold(cell) for cell in cells]
        if words := [word for mark, word in MARKS.items() if row.get(mark)]:
            cells[0] += f" *({', '.join(words)})*"
        rows.append(cells)
    numeric = [_is_number(column, table) for column in table.columns]
    return grid([column.heading for column in table.columns], rows, numeric)


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool] = ()) -> str:
    """A table of Markdown; columns of numbers are aligned on the right."""
    lines = [headings, ["---:" if right else "---" for right in numeric or [False] * len(headings)], *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|").replace("\n", " ")


def _bold(text: str) -> str:
    return f"**{text.replace('**', '')}**" if text else text


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda found: "&lt;" if found[0] == "<" else found[0], text)


def _is_number(column: Column, table: Table) -> bool:
    """Whether a column's values are numbers."""
    values = [value for row in table.rows if (value := row.get(column.key)) is not None]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return column.digits is not None or (bool(values) and numbers)


def _fact(value: object) -> str:
    """A fact of a machine in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_fact(each)}" for name, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
