"""A failed test runs once more, alone: if it passes then, it is flaky, and says so instead of failing the run.

`.ci/run` asks for it with `--once-more=FILE`, and prints what was added to the file as its last lines. A run that ends
for another reason than failed tests, such as a module that can't be imported, fails as it is.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

OPTION = "--once-more"
#: More failures than these are no accident of a busy machine.
MOST = 5


class OnceMore:
    """The plugin of one run."""

    def __init__(self) -> None:
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._failed:
            self._failed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        outcome = yield
        place, failed = session.config.getoption(OPTION), self._failed
        if place and not hasattr(session.config, "workerinput") and exitstatus == pytest.ExitCode.TESTS_FAILED:
            options = _options(session.config)
            if len(failed) <= MOST and all(_passes(name, options) for name in failed):
                session.exitstatus = pytest.ExitCode.OK
                with Path(place).open("a") as file:
                    file.writelines(f"FLAKY: {name}\n" for name in failed)
        return outcome


def _options(config: pytest.Config) -> list[str]:
    """Where the tests of this run keep what they store: a test that runs again must do the same."""
    return [*(["--acl"] if config.getoption("--acl") else []), "--chunk-files", config.getoption("--chunk-files")]


def _passes(name: str, options: Sequence[str]) -> bool:
    sys.stdout.write(f"\nonce more, alone: {name}\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, name]
    return subprocess.run(command, check=False).returncode == pytest.ExitCode.OK
