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
    config.pluginmanager.register(once_more)
"""
FLAKY = """
from pathlib import Path

def test_flaky():
    again = Path("again").exists()
    Path("again").touch()
    assert again
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    pytester.makeconftest(CONFTEST)
    return pytester


def test_a_flaky_test_is_named_and_fails_nothing(run: pytest.Pytester) -> None:
    run.makepyfile(test_it=FLAKY)
    assert run.runpytest_subprocess("--once-more", "found").ret == pytest.ExitCode.OK
    assert Path("found").read_text() == "FLAKY: test_it.py::test_flaky\n"


def test_a_test_that_fails_twice_fails_the_run(run: pytest.Pytester) -> None:
    run.makepyfile(test_it=FLAKY, test_bad="def test_bad(): raise ValueError")
    assert run.runpytest_subprocess("--once-more", "found").ret == pytest.ExitCode.TESTS_FAILED
    assert not Path("found").exists()


def test_a_run_that_could_not_begin_fails(run: pytest.Pytester) -> None:
    run.makepyfile(test_it="import no_such_module")
    assert run.runpytest_subprocess("--once-more", "found").ret == pytest.ExitCode.INTERRUPTED
