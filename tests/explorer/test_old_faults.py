"""The explorer finds the faults that were found before, in the scripts and the client code as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.explorer.machine import Found
from tests.explorer.scenarios import SCENARIOS


def first_found(folder: Path, scenario: str, invariant: str, **old: Any) -> Found:
    """The first violation of an invariant, with its trace as the states were gone through."""
    with SCENARIOS[scenario].machine(folder, **old) as machine:
        coverage = machine.explore(seconds=150.0, stop_at=invariant)
        print(coverage)
        found = [each for each in coverage.found if each.violation.invariant == invariant]
        assert found, f"not found: {coverage}; found instead: {[each.violation for each in coverage.found]}"
        print(found[-1])
        return found[-1]


def test_sealing_revives_a_job_that_its_budget_ended(folder: Path) -> None:
    found = first_found(folder, "budget", "a stopped job has failed", old_scripts=True, before=True)
    assert "seal(2) → None" in found.trace[-1]


def test_a_producer_waits_for_room_in_a_cancelled_job(folder: Path) -> None:
    found = first_found(folder, "room", "nobody waits for what cannot come", old_scripts=True, before=True)
    assert found.violation.seen == "producer waits, and the job is cancelled"


def test_a_producer_waits_for_room_in_a_job_that_its_budget_ended(folder: Path) -> None:
    found = first_found(folder, "room and budget", "nobody waits for what cannot come", old_scripts=True, before=True)
    assert found.violation.seen == "producer waits, and the job is failed"


def test_a_retry_that_died_leaves_a_job_open(folder: Path) -> None:
    found = first_found(folder, "retry", "a job that has all its records ends", old_scripts=True, before=True)
    assert "retrier: dies" in found.trace


def test_a_result_is_taken_for_another_text(folder: Path) -> None:
    found = first_found(
        folder, "changed corpus", "a result is of the text that the job holds", old_scripts=True, before=True
    )
    assert any(step.startswith("redis: goes back") for step in found.trace)


def test_nobody_tells_who_waits_that_the_seal_is_lost(folder: Path) -> None:
    found = first_found(folder, "lost seal", "nobody waits for what cannot come", old_scripts=True, before=True)
    assert any(step.startswith("redis: goes back") for step in found.trace)


def test_nobody_tells_who_waits_that_the_producer_died(folder: Path) -> None:
    found = first_found(
        folder, "death of a producer", "nobody waits for what cannot come", old_scripts=True, before=True
    )
    assert found.violation.seen == "waiter waits, and the job is submitting"


@pytest.mark.parametrize("scenario", ["everybody with a budget"])
def test_a_seed_finds_a_fault_again_and_its_walk_is_shortened(folder: Path, scenario: str) -> None:
    with SCENARIOS[scenario].machine(folder, old_scripts=True, before=True) as machine:
        seed, found = next((seed, met) for seed in range(200) if (met := machine.walk(seed)) is not None)
        again = machine.walk(seed)
        assert again is not None
        assert again.moves == found.moves
        shorter = machine.shrunk(found)
        print(f"seed {seed}: {shorter}")
        assert shorter.violation.invariant == found.violation.invariant
        assert len(shorter.moves) < len(found.moves)
