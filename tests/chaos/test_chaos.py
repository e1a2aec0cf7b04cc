"""One short run of the harness."""

from __future__ import annotations

import pytest

from tests.chaos.campaign import run
from tests.chaos.options import Options
from tests.chaos.report import markdown


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_storm_loses_and_doubles_nothing() -> None:
    outcome = run(
        Options(minutes=0.25, seed=269, producers=1, crashers=False, lease_s=1.0, pause_s=1.0, settle_s=120.0)
    )
    print(markdown(outcome))
    assert outcome.good, markdown(outcome)
    assert outcome.faults.total() >= 7
    assert outcome.records > 300
    assert outcome.deaths.total() >= 2
