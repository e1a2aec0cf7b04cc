"""Settings for tests of single steps: nothing lapses unless a test says so."""

from __future__ import annotations

import pytest

from embedctl_config.settings import Settings
from tests.support.clocks import MovedClock
from tests.support.limits import limited


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Leases far longer than a test on a busy machine. Tests make chunks `overdue`, or choose a lease of their own."""
    return limited(settings.replace(lease_s=300.0), reissue_s=600.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """The monotonic clock of all that runs in this process."""
    return MovedClock(monkeypatch)
