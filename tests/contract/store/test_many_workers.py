"""With a thousand workers and 100,000 jobs, no heartbeat and no look reads all of them for a few."""

from __future__ import annotations

import time

import pytest
import redis as redis_py

from embedctl import overview
from embedctl.broker import Broker
from embedctl.job import Job
from embedctl.machine import machine_id
from embedctl.overview import Gatherer
from embedctl.reaper import Reaper
from embedctl.terminal.drawing import overview_lines
from embedctl_config import keys
from tests.support.store import QUEUE, calls, new_job, row


def test_the_workers_of_this_machine_are_found_without_reading_the_others(broker: Broker, raw: redis_py.Redis) -> None:
    for number in range(30):
        broker.workers.beat(row(f"far{number}", machine="another machine"))
    for instance in ("mine", "expired", "left"):
        broker.workers.beat(row(instance, machine=machine_id()))
    raw.zadd(keys.WORKERS, {"expired": broker.connection.now_ms() - 1})
    broker.workers.leave(row("left", machine=machine_id()))
    raw.config_resetstat()
    assert [worker.instance for worker in broker.workers.here()] == ["mine"]
    assert [calls(raw, name) for name in ("get", "mget", "zrangebyscore")] == [2, 0, 0]


def test_a_worker_asks_once_whether_a_job_waits_for_its_queues(broker: Broker, raw: redis_py.Redis) -> None:
    queues = [QUEUE, *(keys.queue("dummy", name) for name in "abc")]
    raw.config_resetstat()
    broker.upkeep.agenda.wake(queues)
    broker.upkeep.agenda.wake([])
    assert (calls(raw, "exists"), calls(raw, "zrange")) == (1, 0)


def test_gone_workers_are_read_by_slices(
    broker: Broker, observed: Broker, trips: list[str], raw: redis_py.Redis
) -> None:
    for number in range(30):
        broker.workers.beat(row(f"w{number}"))
        raw.zadd(keys.WORKERS, {f"w{number}": broker.connection.now_ms() - 1 - number})
    assert len(list(observed.workers.gone())) == 30
    assert len(trips) <= 4


def test_a_look_at_a_thousand_workers_takes_ten_round_trips(broker: Broker, observed: Broker, trips: list[str]) -> None:
    job_id = new_job(broker, chunks=1)
    for number in range(1000):
        broker.workers.beat(row(f"w{number}"))
    assert len(Gatherer(observed).look().workers) == 1000
    assert len(trips) <= 10
    trips.clear()
    job = Job(job_id, observed)
    assert (job.status().live_workers, len(job.workers()), job.gone_workers(), job.suspects()) == (1000, 1000, [], [])
    assert len(trips) <= 12


def test_a_round_of_the_reaper_takes_thirty_round_trips_with_many_workers_and_jobs(
    old_redis: None, broker: Broker, observed: Broker, trips: list[str], raw: redis_py.Redis
) -> None:
    for number in range(300):
        broker.workers.beat(row(f"w{number}"))
    for job_id in [new_job(broker, chunks=1) for _ in range(80)]:
        raw.zadd(keys.UPKEEP, {job_id: 1})
    raw.config_resetstat()
    Reaper(observed).round()
    assert calls(raw, "evalsha") >= 2 * 80  # each job is looked at and issued
    assert calls(raw, "mget") == 0  # no heartbeat is read
    assert len(trips) <= 36  # with those that load a script into a new Redis


def test_workers_gone_are_counted_by_kind_and_named_if_asked_for(
    broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "GONE_SHOWN", 5)
    for number in range(12):
        broker.workers.beat(row(f"w{number}", *(["other"] if number % 3 else [])))
        raw.zadd(keys.WORKERS, {f"w{number}": broker.connection.now_ms() - 1000 * (number + 1)})
    seen = Gatherer(broker).look()
    assert len(seen.gone) == 5
    assert seen.more_gone == {("dummy", "dummy", "dummy"): 4, ("dummy", "other", "dummy"): 8}
    said = [line.plain.strip() for line in overview_lines(seen) if "status --all" in line.plain]
    assert [line.split()[0] for line in said] == ["4", "8"]
    every = Gatherer(broker, all_gone=True).look()
    assert sum("no word from it" in line.plain for line in overview_lines(every)) == 12
    # A heartbeat ends a little sooner than its worker's name.
    raw.delete(*(keys.heartbeat(f"w{number}") for number in range(5, 12)))
    assert [each.worker.instance for each in Gatherer(broker).look().gone] == ["w4", "w3", "w2", "w1", "w0"]


def test_a_list_reads_no_more_jobs_than_it_shows_and_one(broker: Broker, raw: redis_py.Redis) -> None:
    ids = [new_job(broker, chunks=1) for _ in range(12)]
    raw.config_resetstat()
    newest = broker.jobs.newest(4)
    assert {next(newest).id for _ in range(3)} < set(ids)
    assert calls(raw, "hgetall") == 4


def test_offers_of_many_workers_are_kept_longer(broker: Broker) -> None:
    for number in range(250):
        broker.workers.beat(row(f"w{number}"))
    began = time.monotonic()
    broker.workers.offers()
    assert broker.workers._offers_until >= began + 2.5  # a busy machine only makes it later


def test_the_end_of_an_id_is_compared_by_redis(broker: Broker, raw: redis_py.Redis) -> None:
    at = time.strftime("%Y%m%d-%H%M%S", time.gmtime(broker.connection.now_ms() / 1000))
    raw.zadd(keys.JOBS, {f"{at}-{number:010x}": 1_000_000 + number for number in range(12_000)})
    job_id = new_job(broker, chunks=1)
    raw.config_resetstat()
    assert broker.jobs.resolve(job_id[-9:]) == job_id
    assert calls(raw, "zscan") <= 20
    assert calls(raw, "zrange") == 0
