"""With a thousand workers and 100,000 jobs, no heartbeat and no look reads all of them for a few."""

from __future__ import annotations

import time

import pytest
import redis as redis_py

from embedctl.broker import Broker
from embedctl.machine import machine_id
from embedctl_config import keys
from embedctl_config.errors import NotPermitted
from embedctl_config.settings import Settings
from tests.support.store import QUEUE, new_job, row


def calls(raw: redis_py.Redis, *commands: str) -> list[int]:
    """How often Redis was asked each of these since its statistics were reset."""
    stats = raw.info("commandstats")
    return [int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in commands]


def test_the_workers_of_this_machine_are_found_without_reading_the_others(broker: Broker, raw: redis_py.Redis) -> None:
    for number in range(30):
        broker.workers.beat(row(f"far{number}", machine="another machine"))
    for instance in ("mine", "expired", "left"):
        broker.workers.beat(row(instance, machine=machine_id()))
    raw.zadd(keys.WORKERS, {"expired": broker.connection.now_ms() - 1})
    broker.workers.leave(row("left", machine=machine_id()))
    raw.config_resetstat()
    assert [worker.instance for worker in broker.workers.here()] == ["mine"]
    assert calls(raw, "get", "mget", "zrangebyscore") == [2, 0, 0]


def test_a_worker_asks_once_whether_a_job_waits_for_its_queues(broker: Broker, raw: redis_py.Redis) -> None:
    queues = [QUEUE, *(keys.queue("dummy", name) for name in "abc")]
    raw.config_resetstat()
    broker.upkeep.agenda.wake(queues)
    assert calls(raw, "exists", "zrange") == [1, 0]
    broker.upkeep.agenda.wake([])
    assert calls(raw, "exists", "zrange") == [1, 0]


def test_gone_workers_are_read_by_slices(settings: Settings, broker: Broker, raw: redis_py.Redis) -> None:
    trips: list[str] = []
    observed = Broker.connect(settings, lambda name, *_: trips.append(name))
    for number in range(30):
        broker.workers.beat(row(f"w{number}"))
        raw.zadd(keys.WORKERS, {f"w{number}": broker.connection.now_ms() - 1 - number})
    assert len(list(observed.workers.gone())) == 30
    assert trips.count("PIPELINE") == 1
    assert len(trips) <= 4
    observed.close()


def test_a_list_reads_no_more_jobs_than_it_shows_and_one(broker: Broker, raw: redis_py.Redis) -> None:
    ids = [new_job(broker, chunks=1) for _ in range(12)]
    raw.config_resetstat()
    newest = broker.jobs.newest(4)
    assert {next(newest).id for _ in range(3)} < set(ids)
    assert calls(raw, "hgetall") == [4]


def test_offers_of_many_workers_are_kept_longer(broker: Broker) -> None:
    for number in range(250):
        broker.workers.beat(row(f"w{number}"))
    began = time.monotonic()
    broker.workers.offers()
    assert broker.workers._offers_until >= began + 2.5


def test_the_end_of_an_id_is_compared_by_redis(broker: Broker, raw: redis_py.Redis) -> None:
    at = time.strftime("%Y%m%d-%H%M%S", time.gmtime(broker.connection.now_ms() / 1000))
    raw.zadd(keys.JOBS, {f"{at}-{number:010x}": 1_000_000 + number for number in range(12_000)})
    job_id = new_job(broker, chunks=1)
    raw.config_resetstat()
    assert broker.jobs.resolve(job_id[-9:]) == job_id
    scans, walks = calls(raw, "zscan", "zrange")
    assert scans <= 20
    assert walks == 0


def test_an_older_access_list_lets_the_end_of_an_id_be_found(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotPermitted("no permission to run the 'zscan' command")

    job_id = new_job(broker, chunks=1)
    monkeypatch.setattr(redis_py.Redis, "zscan_iter", refuse)
    assert broker.jobs.resolve(job_id[-9:]) == job_id
