"""The error tree: one root, one sentence each, exit statuses that scripts may rely on."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys

import pytest

import embedctl
from embedctl_config import errors
from embedctl_config.errors import EmbedctlError, ExitStatus

ERRORS = [
    each
    for each in vars(errors).values()
    if inspect.isclass(each) and issubclass(each, Exception) and each.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_descends_from_the_root_and_says_when_it_is_raised(error: type[Exception]) -> None:
    assert issubclass(error, EmbedctlError)
    assert error.__doc__
    expected = "The root of" if error.__subclasses__() and not error.__doc__.startswith("Raised") else "Raised when"
    assert error.__doc__.startswith(expected)


def test_every_error_can_be_imported_from_the_package() -> None:
    assert {error.__name__ for error in ERRORS} <= set(embedctl.__all__)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    lines = errors.__doc__.split("::", 1)[1].splitlines()
    parents: list[tuple[int, str]] = []
    found: dict[str, str] = {}
    for line in filter(str.strip, lines):
        name = line.replace("│", " ").replace("├── ", "    ").replace("└── ", "    ")
        depth = len(name) - len(name.lstrip())
        name = name.split()[0]
        while parents and parents[-1][0] >= depth:
            parents.pop()
        found[name] = parents[-1][1] if parents else "Exception"
        parents.append((depth, name))
    assert found == {error.__name__: error.__bases__[0].__name__ for error in ERRORS}


def test_errors_are_caught_by_their_builtin_kind_too() -> None:
    assert {error.__name__: error.__bases__[1] for error in ERRORS if error.__bases__[1:]} == {
        "SettingsError": ValueError,
        "InputError": ValueError,
        "WireError": ValueError,
        "MissingExtra": ImportError,
        "BrokerUnavailable": ConnectionError,
        "DestinationUnavailable": ConnectionError,
        "JobNotFound": LookupError,
        "ModelNotFound": LookupError,
        "WaitTimeout": TimeoutError,
    }


def test_every_error_has_an_exit_status_that_is_named() -> None:
    named = set(ExitStatus) - {0}
    assert {
        each.__name__ for each in ERRORS if not (issubclass(each, EmbedctlError) and each.exit_code in named)
    } == set()
    assert (errors.SettingsError.exit_code, errors.JobNotFound.exit_code, errors.WaitTimeout.exit_code) == (2, 4, 124)


def test_sigterm_ends_the_first_process_of_a_container_too() -> None:
    """From that one, the kernel keeps signals that nothing handles."""
    program = """
import os, signal
me, os.getpid = os.getpid(), lambda: 1
from embedctl_config.command_group import one_line_errors
with one_line_errors("x"):
    os.kill(me, signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 128 + signal.SIGTERM
