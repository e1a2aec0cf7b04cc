"""What the library of threads that share an operator is told. tests/contract/backends/test_teams.py runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from embedctl_workers.machine import teams

PLACES = (frozenset({0, 2}), frozenset({1}))
OF_USERS = ("OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, str]]]:
    """The variables of GNU OpenMP that the library saw, each time it was loaded."""
    seen: list[dict[str, str]] = []
    for name in OF_USERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(teams, "_LIBRARY", "a library that nobody has loaded")
    monkeypatch.setattr(
        teams,
        "import_module",
        lambda _: seen.append({name: os.environ[name] for name in OF_USERS if name in os.environ}),
    )
    monkeypatch.setattr(teams, "_bound", ())
    yield seen
    assert teams._bound == (), "the stand-in bound nothing"


def test_the_library_is_told_the_places_and_nobody_else_is(told: list[dict[str, str]]) -> None:
    teams.bind(PLACES)
    assert told == [{"OMP_PLACES": "{0,2},{1}", "OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "active"}]
    assert not any(name in os.environ for name in OF_USERS)


@pytest.mark.parametrize("variable", OF_USERS)
def test_who_has_said_where_threads_run_is_heard(
    told: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "0")
    teams.bind(PLACES)
    assert told == []
    assert os.environ[variable] == "0"
