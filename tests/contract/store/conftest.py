"""Settings for tests of single steps: nothing lapses unless a test says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl_config.settings import Settings
from tests.support.clocks import MovedClock
from tests.support.redis_server import RedisServer
from tests.support.store import Trips


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
def own_broker(own_redis: RedisServer, settings: Settings) -> Iterator[Broker]:
    broker = Broker.connect(settings.replace(redis_url=own_redis.url))
    yield broker
    broker.close()


@pytest.fixture
def own_raw(own_redis: RedisServer) -> Iterator[Redis]:
    client = Redis.from_url(own_redis.url)
    yield client
    client.close()


@pytest.fixture
def trips() -> Trips:
    """The round trips of `observed`."""
    return []


@pytest.fixture
def observed(settings: Settings, trips: Trips) -> Iterator[Broker]:
    broker = Broker.connect(settings, lambda *trip: trips.append(trip))
    yield broker
    broker.close()
