"""The table in docs/gateway.md of clients and what was done with them, from the tests marked `client(NAME, WHAT)`.

NAME is the client's; if it is a package of this environment, that gives the version, else a test records the property
`version`. With `--clients-table FILE`, a run writes its results into FILE, and leaves the rows of other tests there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

OPTION = "--clients-table"
BEGIN = "<!-- Written by `make clients-table`: changes made here are overwritten. -->\n"
END = "<!-- The end of what `make clients-table` writes. -->\n"
HEAD = "| client | version | what was done | result |\n| --- | --- | --- | --- |\n"
WORKS, FAILS, NOT_RUN = "works", "**fails**", "not run: "
_CLIENT, _VERSION = "client", "version"


class Row(NamedTuple):
    """A line of the table."""

    client: str
    version: str
    done: str
    result: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What another run's row replaces: several major versions of a client have a row each."""
        return self.client.lower(), self.done, self.version.partition(".")[0]

    @property
    def test(self) -> tuple[str, str]:
        """What its test is marked with."""
        return self.client, self.done

    @property
    def was_run(self) -> bool:
        """Whether its test was not skipped."""
        return not self.result.startswith(NOT_RUN)

    @property
    def line(self) -> str:
        """As it stands in the table."""
        return f"| {' | '.join(self)} |\n"


def pytest_itemcollected(item: pytest.Item) -> None:
    if (mark := item.get_closest_marker(_CLIENT)) is not None:
        name, done = mark.args
        item.user_properties.append((_CLIENT, [name, done]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if file := config.getoption(OPTION):
        write(Path(file), rows_of(terminalreporter.stats))


def rows_of(stats: Mapping[str, Sequence[object]]) -> list[Row]:
    """The rows of the tests that a run had, by their reports."""
    rows = [
        _row(report, result)
        for outcome, result in (("passed", WORKS), ("skipped", NOT_RUN), ("failed", FAILS), ("error", FAILS))
        for report in stats.get(outcome, [])
        if isinstance(report, pytest.TestReport) and _CLIENT in dict(report.user_properties)
    ]
    return list({row.key: row for row in rows}.values())  # a failure is the last word


def write(file: Path, rows: Sequence[Row]) -> None:
    """Put rows into the table of a page. Those of tests that there are no more go, and failures that are mended."""
    before, _, rest = file.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    run_now, marked = {row.test for row in rows}, set(marked_tests())
    old = [row for row in rows_in(file) if row.result != FAILS or row.test not in run_now]
    found = {row.key: row for row in [*old, *rows] if row.test in marked}
    ever_run = {row.test for row in found.values() if row.was_run}
    kept = [row for row in found.values() if row.was_run or row.test not in ever_run]
    lines = "".join(row.line for row in sorted(kept, key=lambda row: row.key))
    file.write_text(f"{before}{BEGIN}\n{HEAD}{lines}\n{END}{after}", "utf-8")


def rows_in(file: Path) -> list[Row]:
    """The rows of the table of a page."""
    text = file.read_text("utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    return [Row(*map(str.strip, line.strip("|").split("|"))) for line in text.splitlines()[2:]]


def marked_tests() -> Iterator[tuple[str, str]]:
    """The client and what is done with it of each marked test."""
    for path in sorted((Path(__file__).parents[1] / "e2e").glob("test_*.py")):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "pytest.mark.client(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.client":
                client, done = map(ast.literal_eval, node.args)
                yield client, done


def _row(report: pytest.TestReport, result: str) -> Row:
    properties: dict[str, Any] = dict(report.user_properties)
    name, done = properties[_CLIENT]
    if report.skipped:
        assert isinstance(report.longrepr, tuple)
        return Row(name, "", done, NOT_RUN + report.longrepr[2].removeprefix("Skipped: "))
    return Row(name, str(properties.get(_VERSION) or _version(name)), done, result)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
