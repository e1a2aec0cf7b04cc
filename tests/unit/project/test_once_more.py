"""A flaky test is named and fails nothing; a test that fails twice fails the run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.support import once_more

def pytest_addoption(parser):
    for option, default in (("--acl", False), ("--chunk-files", "redis"), (once_more.OPTION, None)):
        parser.addoption(option, default=default)

def pytest_configure(config):
    config.pluginmanager.register(once_more.OnceMore())
"""
FLAKY = """
from pathlib import Path

def test_flaky():
    again = Path("again").exists()
    Path("again").touch()
    assert again
"""


@pytest.mark.parametrize(
    ("files", "status", "found"),
    [
        ({"test_it": FLAKY}, pytest.ExitCode.OK, "FLAKY: test_it.py::test_flaky\n"),
        ({"test_it": FLAKY, "test_bad": "def test_bad(): raise ValueError"}, pytest.ExitCode.TESTS_FAILED, ""),
        ({"test_it": "import no_such_module"}, pytest.ExitCode.INTERRUPTED, ""),
    ],
    ids=["flaky", "flaky and failing", "could not begin"],
)
def test_only_flaky_tests_fail_nothing_and_are_named(
    files: dict[str, str], status: int, found: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take most of the time of such a small run
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(**files)
    Path("found").touch()
    assert pytester.runpytest_inprocess("--once-more", "found").ret == status
    assert Path("found").read_text() == found
