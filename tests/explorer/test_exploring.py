"""In whatever order things happen, every invariant of a job holds, and every wait comes to an end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.explorer.machine import EXPLORED, Coverage
from tests.explorer.scenarios import SCENARIOS

SMALL = [name for name in SCENARIOS if not name.startswith("everybody")]
LARGE = [name for name in SCENARIOS if name.startswith("everybody")]


#: Records how far an exploration went, for the summary at the end.
Note = Callable[[str, object], None]
#: Steps in each small world, and walks through each large one: the same on each machine, some seconds.
#: `python -m tests.explorer --seconds` goes further.
STEPS, WALKS = 250, 15


def report(name: str, coverage: Coverage, note: Note | None = None) -> None:
    print(f"{name}: {coverage}")
    if note is not None:
        note(EXPLORED, [name, coverage.steps, coverage.states, coverage.depth, coverage.paths, coverage.seconds])
    assert not coverage.found, "\n".join(map(str, coverage.found))


@pytest.mark.parametrize("scenario", ["budget", "retry"])
def test_the_first_steps_of_all_go_well(folder: Path, scenario: str) -> None:
    with SCENARIOS[scenario].machine(folder) as machine:
        coverage = machine.explore(depth=5, most=600)
    assert coverage.states > 10
    report(scenario, coverage)


def test_a_few_walks_go_well(folder: Path) -> None:
    with SCENARIOS["everybody and an older Redis"].machine(folder) as machine:
        coverage = Coverage()
        found = [met for seed in range(5) if (met := machine.walk(seed, steps=40, coverage=coverage))]
    assert coverage.steps > 100
    assert not found, str(machine.shrunk(found[0]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SMALL)
def test_all_orders_of_steps_in_a_small_world_go_well(folder: Path, scenario: str, record_property: Note) -> None:
    with SCENARIOS[scenario].machine(folder) as machine:
        report(scenario, machine.explore(most=STEPS), record_property)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", LARGE)
def test_walks_through_a_large_world_go_well(folder: Path, scenario: str, record_property: Note) -> None:
    with SCENARIOS[scenario].machine(folder) as machine:
        report(scenario, machine.walks(range(WALKS)), record_property)
