"""What passes between a process and Redis: what is refused for good or for the moment, and what an observer hears."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
from redis import Redis
from redis._parsers.base import BaseParser

from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.queueing.retrying import retry_redis
from embedctl.store.connection import Connection
from embedctl_config import keys
from embedctl_config.errors import BrokerRefused, BrokerUnavailable, JobDamaged
from embedctl_config.settings import Settings
from tests.support.store import Trips, complete, new_job, payload, row, take
from tests.support.waiting import PATIENCE_S


def test_a_key_of_another_type_is_refused_and_nobody_asks_again(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    raw.set(keys.owners(job_id), "somebody else's")
    asked = iter([partial(broker.jobs.renew, job_id, 0, "t")])
    with pytest.raises(BrokerRefused, match="WRONGTYPE") as raised:
        retry_redis(lambda: next(asked)())
    assert isinstance(raised.value, BrokerUnavailable)  # who catches what it was until now still does


def test_who_waits_for_damage_is_told_at_once(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_config.retry.RETRY_S", math.inf)  # an outage would be waited for for ever
    job_id = new_job(broker)
    raw.delete(keys.job(job_id))
    raw.set(keys.job(job_id), "somebody else's")
    with pytest.raises(JobDamaged, match=f"{keys.job(job_id)} is of another type"):
        Job(job_id, broker).wait()


@pytest.mark.parametrize(
    "reason",
    [
        "READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_1): @user_script:3: @user_script: 3: -READONLY You can't write",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    ],
)
def test_what_passes_is_no_refusal_and_ends_the_connection(broker: Broker, reason: str) -> None:
    before = _client_id(broker)
    with pytest.raises(BrokerUnavailable) as raised, broker.connection.client():
        raise _error(reason)
    assert not isinstance(raised.value, BrokerRefused)
    assert _client_id(broker) != before


@pytest.mark.parametrize("reason", ["CROSSSLOT Keys don't hash to the same slot", "MOVED 3999 127.0.0.1:6381"])
def test_a_cluster_is_called_one(broker: Broker, reason: str) -> None:
    with pytest.raises(BrokerRefused, match=r"is a cluster .*cluster-enabled no"), broker.connection.client():
        raise _error(reason)


def test_nothing_is_submitted_to_a_cluster(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    info = Redis.info
    monkeypatch.setattr(Redis, "info", lambda *asked: {**info(*asked), "redis_mode": "cluster"})
    with pytest.raises(BrokerRefused, match="is a cluster"):
        broker.connection.check_server()


def test_the_arguments_of_a_command_do_not_decide_what_its_error_is(broker: Broker, raw: Redis) -> None:
    raw.set("embed:other", "text")
    with pytest.raises(BrokerRefused, match="WRONGTYPE") as raised, broker.connection.client() as client:
        client.pipeline(transaction=False).lpush("embed:other", "-READONLY CROSSSLOT").execute()
    assert "READONLY" not in str(raised.value)


def _error(reason: str) -> Exception:
    error: Exception = BaseParser.parse_error(reason)  # type: ignore[no-untyped-call]  # redis-py gives it no types
    return error


def _client_id(broker: Broker) -> int:
    with broker.connection.client() as client:
        return int(client.client_id())


def names(trips: Trips) -> list[str]:
    """What was told since the last call; each was answered."""
    assert all(answered and 0 < seconds < PATIENCE_S for _, seconds, answered in trips)
    found = [name for name, _, _ in trips]
    trips.clear()
    return found


@pytest.mark.in_redis
def test_each_round_trip_is_told_once_and_changes_nothing(observed: Broker, broker: Broker, trips: Trips) -> None:
    observed.workers.beat(row())
    with observed.connection.client() as client, broker.connection.client() as plain:
        assert client.get("embed:nothing") is None
        assert client.pipeline(transaction=False).set("embed:x", 1, ex=1000).get("embed:x").execute() == [True, b"1"]
        assert type(plain) is Redis  # nothing stands between where nobody observes
    assert names(trips)[-4:] == ["TIME", "PIPELINE", "GET", "PIPELINE"]
    job_id = new_job(observed, 1)
    trips.clear()
    assert take(observed) is not None
    assert names(trips)[-1] == "next"
    assert complete(observed, job_id, 0, text=payload(0)) == "ok"
    # A Redis that does not know a script yet is sent it.
    assert names(trips) in (["complete"], ["complete", "SCRIPT LOAD", "complete"])


def test_a_redis_that_is_not_there_has_not_answered(trips: Trips, short_folder: Path) -> None:
    connection = Connection(Settings(redis_url=f"unix://{short_folder}/absent.sock"), lambda *trip: trips.append(trip))
    with pytest.raises(BrokerUnavailable):
        connection.now_ms()
    ((name, _, answered),) = trips
    assert (name, answered) == ("TIME", False)
