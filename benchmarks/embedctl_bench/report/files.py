"""A report's files in a folder."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from embedctl_bench.report.report import Report


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write NAME.html, which needs no other file, NAME.md with NAME-PLOT.svg, NAME.json and NAME-TABLE.csv.

    A plot without a value, as there may be after Ctrl-C, is left out.
    A file is replaced as a whole, so that a reader sees the report before or this one.

    Returns:
        What was written, the HTML first.

    Raises:
        MissingExtra: matplotlib or jinja2 is not installed.
        ValueError: two files would have the same name, or a name is not allowed.
    """
    # The libraries that draw are loaded only after everything is measured.
    from embedctl_bench.report import csv, html, json, markdown, plots

    shown = [plot for plot in report.plots if any(value == value for series in plot.series for value in series.y)]
    report = dataclasses.replace(report, plots=shown)
    pictures = {plot.name: plots.draw(plot) for plot in shown}
    files = [
        (f"{report.name}.html", html.page(report, pictures)),
        (f"{report.name}.md", markdown.page(report)),
        (f"{report.name}.json", json.document(report)),
        *((f"{report.name}-{table.name}.csv", csv.lines(table)) for table in report.tables),
        *((f"{report.name}-{name}.svg", plots.standalone(picture)) for name, picture in pictures.items()),
    ]
    names = [name for name, _ in files]
    if wrong := {name for name in names if names.count(name) > 1 or not re.fullmatch(r"[\w.-]+", name)}:
        raise ValueError(f"no names, or not one each, for files: {', '.join(sorted(wrong))}")
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(folder / name, text) for name, text in files]


def _write(path: Path, text: str) -> Path:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(path)
