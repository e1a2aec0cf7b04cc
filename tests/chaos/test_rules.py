"""Rules of the harness that need no running processes: which faults and jobs are drawn, which ends are good, which
silences are explained."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from tests.chaos.check import is_spent
from tests.chaos.faults import FAULTS, faults_named
from tests.chaos.jobs import DummyWorkload, Plan
from tests.chaos.options import Options
from tests.chaos.producers import Order, is_good_end, own_ids
from tests.chaos.pulse import Silence, unexplained
from tests.chaos.storm import Event

PLAN = Plan(index=0, key="k", kind="poison", model="dummy", hardware="quick", ttl_s=100, records=40)
STOPPED = "JobFailed: job x was ended by its error budget (max_errors) while it was submitted"
CANCELLED = "JobCancelled: job x was cancelled"


def test_only_faults_of_these_names_are_drawn() -> None:
    assert faults_named([]) == FAULTS
    named = [fault.name for fault in faults_named(["worker: SIGKILL", "link"])]
    assert named == ["worker: SIGKILL", "link: slow"]
    with pytest.raises(ValueError, match="no fault begins with 'wrker'"):
        faults_named(["wrker"])


@pytest.mark.parametrize("kind", ["budget-last", "budget-full"])
def test_these_budgets_are_spent_by_what_is_planned(kind: str) -> None:
    workload = DummyWorkload(Options(minutes=1, seed=3))
    for index in range(5):
        plan = workload.special(kind, index)
        assert plan == workload.special(kind, index), "drawn from the seed"
        codes = workload.expected(plan).codes
        assert codes.keys() == plan.poison.keys()
        assert is_spent(plan, len(codes), plan.records)


def test_a_producer_ends_well_only_for_the_reason_it_was_given() -> None:
    order = Order(PLAN, Path())
    assert is_good_end(order, 0, "id", "")
    assert not is_good_end(order, 1, "", STOPPED)
    assert not is_good_end(order, 1, "", CANCELLED)
    budget = Order(dataclasses.replace(PLAN, max_errors=1), Path())
    assert is_good_end(budget, 1, "", STOPPED)
    assert not is_good_end(budget, 1, "", "Traceback: something else")
    order.cancelling = True
    assert is_good_end(order, 1, "", CANCELLED)
    assert not is_good_end(order, 1, "", "Traceback: something else")
    assert not is_good_end(order, -9, "", CANCELLED)


def test_a_budget_is_a_number_or_a_share() -> None:
    assert not is_spent(PLAN, 40, 40)
    assert is_spent(dataclasses.replace(PLAN, max_errors=3), 4, 1000)
    assert not is_spent(dataclasses.replace(PLAN, max_errors=3), 3, 3)
    assert is_spent(dataclasses.replace(PLAN, max_errors="10%"), 5, 40)
    assert not is_spent(dataclasses.replace(PLAN, max_errors="10%"), 4, 40)


def test_a_silence_is_explained_by_what_was_done_to_that_worker_or_to_all_and_by_nothing_else() -> None:
    now = time.monotonic()
    silence = Silence(1, "i", began_at=now, ended_at=now + 3, seconds=3)

    def explained(*events: Event, restarts: tuple[float, ...] = ()) -> bool:
        return not unexplained([silence], events, restarts)

    assert not explained()
    frozen = "worker: SIGSTOP past the lease, then SIGCONT"
    assert explained(Event(frozen, "worker 1", now - 10, now - 1))
    assert not explained(Event(frozen, "worker 2", now - 10, now - 1))
    assert not explained(Event(frozen, "worker 11", now - 10, now - 1))
    assert explained(Event("worker: out of memory", "worker 1 for 7 s", now - 10, now - 1))
    assert not explained(Event("job: cancelled", "job 1", now - 10, now - 1))
    assert explained(Event("connections: half open", "for 5 s", now - 10, now - 5))
    assert not explained(Event("connections: half open", "for 5 s", now - 200, now - 190))
    assert not explained(Event("connections: half open", "for 5 s", now + 10, None))
    assert explained(restarts=(now - 10,))
    assert not explained(restarts=(now - 200, now + 10))


def test_a_producer_does_not_own_the_jobs_that_its_reaper_speaks_of() -> None:
    own, other = "20261122-150243-c30a9a2488", "20261122-150102-06f8e5c283"
    reaper = f"job {other}: the process died that retried its failed records; those queued go on\n"
    waiting = f"job {own}: its submission waits for another producer of this job\n"
    assert own_ids(f"{own}\n", reaper) == [own]
    assert own_ids("", waiting + reaper) == [own]
    assert own_ids("", f"{reaper}JobCancelled: job {own} was cancelled\n") == [own]
