"""Short runs of the harness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.campaign import run
from tests.chaos.options import Options
from tests.chaos.report import markdown

SHORT = Options(minutes=0.25, faults=7, seed=269, producers=1, lease_s=1.0, pause_s=1.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_storm_loses_and_doubles_nothing() -> None:
    outcome = run(replace(SHORT, crashers=False, settle_s=120.0))
    print(markdown(outcome))
    assert outcome.good, markdown(outcome)
    assert outcome.faults.total() >= 7
    assert outcome.records > 300
    assert outcome.deaths, "which faults can strike, and so their order, depends on how busy the machine is"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_under_a_supervisor_whose_workers_records_kill_lose_and_double_nothing() -> None:
    # Each record that kills takes the start of two processes, one after the other, at the lowest priority.
    outcome = run(replace(SHORT, faults=2, only=("up",), settle_s=400.0))
    print(markdown(outcome))
    assert outcome.good, markdown(outcome)
    assert outcome.faults.total() >= 2
    assert dict(outcome.facts)["processes of `embedctl up` killed at their moment"]
