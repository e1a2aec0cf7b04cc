"""Settings for tests of single steps: nothing lapses unless a test says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from embedctl.queueing.broker import Broker
from embedctl_config.settings import Settings
from tests.support.clocks import MovedClock


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Leases far longer than a test on a busy machine. Tests let leases `lapse`, or choose a lease of their own."""
    return settings.replace(lease_s=300.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """The monotonic clock of all that runs in this process."""
    return MovedClock(monkeypatch)


@pytest.fixture
def old_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis counts as old enough to be reaped."""
    monkeypatch.setattr("embedctl.store.connection.Connection.uptime_s", lambda self: 3600)


@pytest.fixture
def trips() -> list[str]:
    """The round trips of `observed`, by name."""
    return []


@pytest.fixture
def observed(settings: Settings, trips: list[str]) -> Iterator[Broker]:
    broker = Broker.connect(settings, lambda name, seconds, answered: trips.append(name))
    yield broker
    broker.close()
