"""A report as Markdown, ready to paste; its pictures are files beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from embedctl_bench.report.report import Claim, Report, Table
from embedctl_bench.report.text import fact, is_number, marks, pieces


def page(report: Report) -> str:
    """The whole page."""
    return "\n\n".join(_blocks(report)) + "\n"


def _blocks(report: Report) -> Iterator[str]:
    yield f"# {_escaped(report.title)}"
    yield f"Made by `{report.command}`."
    if report.claims:
        yield "## What was published, and what was measured here"
        yield _claims(report.claims)
    yield "## Workload"
    yield _escaped(report.workload)
    for plot in report.plots:
        yield f"![{plot.title}]({report.name}-{plot.name}.svg)"
    for table in report.tables:
        yield f"## {_escaped(table.title)}"
        yield _table(table)
        if table.note:
            yield _escaped(table.note)
    yield "## Machine"
    yield "\n".join(f"- {name}: {_escaped(fact(value))}" for name, value in report.machine.items())
    if report.notes:
        yield "## Notes"
        yield "\n".join(f"- {_escaped(note)}" for note in report.notes)


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
    return _grid(["claim", "published, on other hardware", "here", "met", "why"], rows)


def _table(table: Table) -> str:
    rows = []
    for row in table.rows:
        cells = [column.show(row) for column in table.columns]
        if row.get("_bold"):
            cells = [_bold(cell) for cell in cells]
        if words := marks(row):
            cells[0] += f" *({', '.join(words)})*"
        rows.append(cells)
    numeric = [is_number(column, table) for column in table.columns]
    return _grid([column.heading for column in table.columns], rows, numeric)


def _grid(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool] = ()) -> str:
    """A table; columns of numbers are aligned on the right."""
    lines = [headings, ["---:" if right else "---" for right in numeric or [False] * len(headings)], *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|").replace("\n", " ")


def _bold(text: str) -> str:
    return f"**{text.replace('**', '')}**" if text else text


def _escaped(text: str) -> str:
    """The text with its marks, and `<` escaped outside of code, where it would be taken for HTML."""
    around = {"plain": "", "bold": "**", "code": "`"}
    return "".join(
        f"{around[kind]}{part if kind == 'code' else part.replace('<', '&lt;')}{around[kind]}"
        for kind, part in pieces(text)
    )
