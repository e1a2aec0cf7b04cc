"""The explorer finds the faults that were found before, put back into today's scripts and client code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.explorer.faults import FAULTS
from tests.explorer.machine import Found
from tests.explorer.scenarios import SCENARIOS

pytestmark = pytest.mark.slow


def first_found(folder: Path, fault: str, scenario: str, invariant: str) -> Found:
    """The first violation of an invariant, with its trace as the states were gone through."""
    with SCENARIOS[scenario].machine(folder, FAULTS[fault]) as machine:
        coverage = machine.explore(seconds=300.0, stop_at=invariant)
    print(coverage)
    found = [each for each in coverage.found if each.violation.invariant == invariant]
    assert found, f"not found: {coverage}; found instead: {[each.violation for each in coverage.found]}"
    print(found[-1])
    return found[-1]


def walked_into(folder: Path, fault: str, scenario: str, invariant: str) -> Found:
    """A violation of an invariant on a random walk: for faults that are deep, and that many orders of steps meet."""
    with SCENARIOS[scenario].machine(folder, FAULTS[fault]) as machine:
        for seed in range(5000):
            found = machine.walk(seed)
            if found is not None and found.violation.invariant == invariant:
                print(f"seed {seed}: {found}")
                return found
    raise AssertionError("not found")


def test_sealing_revives_a_job_that_its_budget_ended(folder: Path) -> None:
    found = first_found(folder, "sealing revives a job that its budget ended", "budget", "a stopped job has failed")
    assert "seal(2) → None" in found.trace[-1]


@pytest.mark.parametrize(
    ("find", "fault", "scenario", "seen"),
    [
        (
            walked_into,
            "a producer waits for room in a cancelled job",
            "room",
            "producer waits, and the job is cancelled",
        ),
        (
            walked_into,
            "a producer waits for room in a job that its budget ended",
            "room and budget",
            "producer waits, and the job is failed",
        ),
        (
            first_found,
            "nobody tells who waits that the producer died",
            "death of a producer",
            "waiter waits, and the job is submitting",
        ),
    ],
)
def test_somebody_waits_for_what_cannot_come(
    folder: Path, find: Callable[..., Found], fault: str, scenario: str, seen: str
) -> None:
    assert find(folder, fault, scenario, "nobody waits for what cannot come").violation.seen == seen


@pytest.mark.parametrize(
    ("fault", "scenario", "invariant", "step"),
    [
        ("nobody closes a retry that died", "retry", "a job that has all its records ends", "retrier: dies"),
        (
            "a result is taken for another text",
            "changed corpus",
            "a result is of the text that the job holds",
            "redis: goes back",
        ),
        ("nobody notices that the seal is lost", "lost seal", "nobody waits for what cannot come", "redis: goes back"),
        pytest.param(
            "a result is counted twice",
            "lost result of a lease",
            "counts are those of what is stored",
            "redis: loses the result",
            marks=(pytest.mark.slow, pytest.mark.timeout(600)),  # it is found after thousands of steps
        ),
        (
            "an audit issues the chunks of an ended job",
            "budget and audit",
            "an ended job has no bookkeeping of issued chunks",
            "reaper: ",
        ),
        ("nobody looks after a job", "retry", "what is active is looked after", ""),
    ],
)
def test_what_goes_wrong_is_found(folder: Path, fault: str, scenario: str, invariant: str, step: str) -> None:
    found = first_found(folder, fault, scenario, invariant)
    assert any(each.startswith(step) for each in found.trace)


def test_the_sweep_finds_a_job_that_its_scripts_put_into_no_agenda(folder: Path) -> None:
    """This fault alone does no harm: the sweep is what mends it."""
    with SCENARIOS["retry"].machine(folder, FAULTS["no script schedules a look"]) as machine:
        coverage = machine.explore(most=500, seconds=60.0)
    assert coverage.steps > 100
    assert not coverage.found, "\n".join(map(str, coverage.found))


def test_a_seed_finds_a_fault_again_and_its_walk_is_shortened(folder: Path) -> None:
    fault = FAULTS["sealing revives a job that its budget ended"]
    with SCENARIOS["budget"].machine(folder, fault) as machine:
        seed, found = next((seed, met) for seed in range(200) if (met := machine.walk(seed)) is not None)
        again = machine.walk(seed)
        assert again is not None
        assert again.moves == found.moves
        shorter = machine.shrunk(found)
        print(f"seed {seed}: {shorter}")
        assert shorter.violation.invariant == found.violation.invariant
        assert len(shorter.moves) < len(found.moves)
