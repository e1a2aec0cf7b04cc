"""In whatever order things happen, every invariant of a job holds, and every wait comes to an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explorer.faults import FAULTS
from tests.explorer.scenarios import SCENARIOS

#: What the quick tests explore too.
QUICK = ("retry", "turns and losses", "everybody and an older Redis")
#: Steps around the first state of each world, and walks through it: the same on each machine, about a second of CPU.
#: `python -m tests.explorer --seconds` goes further.
STEPS, WALKS, LONG_WALKS = 150, 5, 15


@pytest.mark.parametrize(
    "scenario", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS]
)
def test_every_order_of_steps_goes_well(folder: Path, scenario: str) -> None:
    large = scenario.startswith("everybody")
    with SCENARIOS[scenario].machine(folder) as machine:
        walked = machine.walks(range(LONG_WALKS if large else WALKS))
        explored = machine.explore(most=0 if large else STEPS)
    print(f"{scenario}: {walked}; {explored}")
    assert walked.steps > 50
    assert not walked.found + explored.found, "\n".join(map(str, walked.found + explored.found))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_was_found_before_is_found_again(folder: Path, fault: str) -> None:
    known = FAULTS[fault]
    with SCENARIOS[known.scenario].machine(folder, known) as machine:
        find = machine.explore(stop_at=known.invariant)
    print(*find.found, sep="\n")
    assert known.invariant in [each.violation.invariant for each in find.found]
