"""What tests cost: CPU seconds by test file, and by whose seconds they are.

`make test ARGS="--costs=costs.md"` adds a table for each of its runs. A test's seconds are those of this process and of
all processes below it, from one test's end to the next one's: so fixtures of a module count for the test that needs
them first.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.forked import server_pids
from tests.support.processes import children

OPTION = "--costs"
_PROPERTY = "costs"
#: Whose CPU seconds: the columns of the table.
KINDS = ("pytest itself", "forked workers and commands", "other processes")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class _Costs:
    """The sums so far of one process of pytest, and its reports' sums in the one that writes the table."""

    before: dict[str, float] = field(default_factory=dict)
    of_tests: dict[str, dict[str, float]] = field(default_factory=dict)


_COSTS = _Costs()


def spent() -> dict[str, float]:
    """CPU seconds of this process and of those below it, ended ones included if their parent lives, by kind."""
    sums = dict.fromkeys(KINDS, 0.0)
    servers = server_pids()
    own = os.times()
    sums[KINDS[0]] = own.user + own.system
    sums[KINDS[2]] = own.children_user + own.children_system
    below = [(pid, KINDS[1] if pid in servers else KINDS[2]) for pid in children(os.getpid())]
    while below:
        pid, kind = below.pop()
        sums[kind] += _seconds(pid)
        below += [(child, kind) for child in children(pid)]
    return sums


def _seconds(pid: int) -> float:
    """The CPU seconds of a process and of its ended children; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption(OPTION):
        _COSTS.before = dict.fromkeys(KINDS, 0.0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown" and item.config.getoption(OPTION):
        now = spent()
        report.user_properties.append((_PROPERTY, {kind: now[kind] - _COSTS.before[kind] for kind in KINDS}))
        _COSTS.before = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, costs in report.user_properties:
        if name == _PROPERTY and isinstance(costs, dict):
            _COSTS.of_tests[report.nodeid] = costs


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    place = terminalreporter.config.getoption(OPTION)
    if not place or hasattr(terminalreporter.config, "workerinput"):
        return
    tests_of: dict[str, list[str]] = defaultdict(list)
    for test in _COSTS.of_tests:
        for name in ("all", test.partition("::")[0], test):
            tests_of[name].append(test)
    rows = {
        name: [sum(_COSTS.of_tests[test][kind] for test in tests) for kind in KINDS] for name, tests in tests_of.items()
    }
    table = [
        f"| file or test | tests | CPU seconds | {' | '.join(KINDS)} |",
        "| --- " + "| ---: " * (2 + len(KINDS)) + "|",
    ]
    for name in sorted(rows, key=lambda name: ("::" in name, -sum(rows[name]))):  # all, then each file, then each test
        seconds = " | ".join(f"{each:.1f}" for each in (sum(rows[name]), *rows[name]))
        table.append(f"| {name} | {len(tests_of[name])} | {seconds} |")
    with Path(place).open("a") as file:  # the quick tests are two runs
        file.write("\n".join(table) + "\n\n")
