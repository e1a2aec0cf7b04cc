"""An observer hears of every round trip, under a name that people know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store.connection import Connection
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.settings import Settings
from tests.support.store import complete, new_job, payload, row, take
from tests.support.waiting import PATIENCE_S

#: The name of a round trip, its seconds, and whether Redis answered.
Trips = list[tuple[str, float, bool]]


def names(told: Trips) -> list[str]:
    """What was told since the last call; each was answered."""
    assert all(answered and 0 < seconds < PATIENCE_S for _, seconds, answered in told)
    found = [name for name, _, _ in told]
    told.clear()
    return found


@pytest.fixture
def told() -> Trips:
    return []


@pytest.fixture
def observed(settings: Settings, told: Trips) -> Iterator[Broker]:
    broker = Broker.connect(settings, lambda *trip: told.append(trip))
    yield broker
    broker.close()


@pytest.mark.in_redis
def test_each_round_trip_is_told_once_and_changes_nothing(observed: Broker, broker: Broker, told: Trips) -> None:
    observed.workers.beat(row())
    with observed.connection.client() as client, broker.connection.client() as plain:
        assert client.get("embed:nothing") is None
        assert client.pipeline(transaction=False).set("embed:x", 1, ex=1000).get("embed:x").execute() == [True, b"1"]
        assert type(plain) is Redis  # nothing stands between where nobody observes
    assert names(told)[-4:] == ["TIME", "PIPELINE", "GET", "PIPELINE"]
    job_id = new_job(observed, 1)
    told.clear()
    assert take(observed) is not None
    assert names(told)[-1] == "next"
    assert complete(observed, job_id, 0, text=payload(0)) == "ok"
    # A Redis that does not know a script yet is sent it.
    assert names(told) in (["complete"], ["complete", "SCRIPT LOAD", "complete"])


def test_a_redis_that_is_not_there_has_not_answered(told: Trips, short_folder: Path) -> None:
    connection = Connection(Settings(redis_url=f"unix://{short_folder}/absent.sock"), lambda *trip: told.append(trip))
    with pytest.raises(BrokerUnavailable):
        connection.now_ms()
    ((name, _, answered),) = told
    assert (name, answered) == ("TIME", False)
