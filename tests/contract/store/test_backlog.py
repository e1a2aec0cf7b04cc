"""What waits, read from thousands of active jobs in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from embedctl.operating.monitoring import watch as watching
from embedctl.operating.monitoring.watch import OTHERS, Sweep, Total, Watch
from embedctl.queueing.broker import Broker
from embedctl.store import backlog
from embedctl.store.backlog import START, Place, read_slice
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerUnavailable
from tests.support.redis_server import RedisServer
from tests.support.store import add, new_job, payload, some, work


def fake_jobs(raw: Any, count: int, score: int = 0, **facts: Any) -> None:
    """Active jobs, each with ten chunks of which three are done, and 420 bytes to encode."""
    pipe = raw.pipeline(transaction=False)
    first = raw.incrby("made", count) - count + 1
    for at in range(first, first + count):
        job_id = f"20261121-073032-{at:010x}"
        fields = {
            "version": wire.VERSION,
            "state": "running",
            "hardware": "cpu",
            "model": "m",
            "added": 10,
            "chunks_done": 3,
            "waiting_bytes": 420,
            "progressed_ms": 1000 * at,
            **facts,
        }
        pipe.hset(keys.job(job_id), mapping={name: value for name, value in fields.items() if value is not None})
        pipe.zadd(keys.ACTIVE, {job_id: score or at})
    pipe.execute()


@pytest.fixture
def watch(broker: Broker) -> Iterator[Watch]:
    watch = Watch(broker)
    yield watch
    watch.stop()


def swept(watch: Watch) -> Sweep:
    watch.look()
    return some(watch.sweep())


def test_what_waits_is_what_the_jobs_say(broker: Broker, watch: Watch) -> None:
    before = broker.connection.now_ms()
    first, second = new_job(broker, chunks=3), new_job(broker, chunks=2, model="other")
    work(broker, first, 0)
    (one, other) = (swept(watch).backlog.queues["dummy", model, "normal"] for model in ("dummy", "other"))
    assert (one.jobs, one.chunks, one.size) == (1, 2, sum(len(payload(at)) for at in (1, 2)))
    assert (other.jobs, other.chunks, other.size) == (1, 2, sum(len(payload(at)) for at in (0, 1)))
    assert one.tokens == pytest.approx(one.size / 4.2)
    assert before <= one.opened_ms <= one.progressed_ms <= broker.connection.now_ms()
    for chunk in (1, 2):
        work(broker, first, chunk)
    broker.jobs.stop(second)
    assert swept(watch).backlog.queues == {}  # they have ended, and the stopped one is still on the list
    third = new_job(broker, chunks=1, seal=False)
    work(broker, third, 0)
    assert [*swept(watch).backlog.queues.values()] == [Total(jobs=1)]  # it waits for its producer
    add(broker, third, 1)
    (total,) = swept(watch).backlog.queues.values()
    assert (total.chunks, total.size) == (1, len(payload(1)))


def test_thousands_of_jobs_are_read_in_slices(broker: Broker, raw: Any, watch: Watch) -> None:
    fake_jobs(raw, 2500, tenant="a", lane="background")
    fake_jobs(raw, 500, score=9_000_000_000_000)  # more than a slice at one moment
    fake_jobs(raw, 7, state="cancelled", score=9_000_000_000_001)
    before = raw.info("commandstats")
    sweep = swept(watch)
    after = raw.info("commandstats")
    assert sweep.backlog.queues["cpu", "m", "background"].jobs == 2500
    assert sweep.backlog.queues["cpu", "m", "normal"].chunks == 500 * 7
    assert {name: total.jobs for name, total in sweep.backlog.tenants().items()} == {"a": 2500, "default": 500}
    assert sweep.backlog.unreadable == 0
    asked = {
        name.removeprefix("cmdstat_"): stats["calls"] - before.get(name, {"calls": 0})["calls"]
        for name, stats in after.items()
    }
    assert asked["zrangebyscore"] == 3007 // 200 + 1 + 1  # the last is that of the workers
    assert asked["hmget"] == 3007 + 1
    assert not asked.get("hgetall")


def test_a_job_that_ends_between_two_slices_hides_no_other(broker: Broker, raw: Any) -> None:
    fake_jobs(raw, 450)
    ids = raw.zrange(keys.ACTIVE, 0, -1)
    one = read_slice(broker.connection, START)
    raw.zrem(keys.ACTIVE, *ids[:100])
    assert one.next is not None
    two = read_slice(broker.connection, one.next)
    assert two.next is not None
    three = read_slice(broker.connection, two.next)
    assert (len(one.jobs), len(two.jobs), len(three.jobs), three.next) == (200, 200, 50, None)


def test_jobs_without_sense_are_counted_and_hide_no_other(raw: Any, watch: Watch) -> None:
    fake_jobs(raw, 1, version=wire.VERSION + 1)
    fake_jobs(raw, 1, state="levitating")
    fake_jobs(raw, 1, added="many")
    fake_jobs(raw, 1, added=None)
    fake_jobs(raw, 1)
    fake_jobs(raw, 1, waiting_bytes=None)
    raw.zadd(keys.ACTIVE, {"20261121-073032-aaaaaaaaaa": 1})  # gone
    raw.zadd(keys.ACTIVE, {"20261121-073032-bbbbbbbbbb": 1})
    raw.set(keys.job("20261121-073032-bbbbbbbbbb"), "no hash")
    sweep = swept(watch)
    assert sweep.backlog.unreadable == 6
    assert [(total.jobs, total.chunks, total.size) for total in sweep.backlog.queues.values()] == [(1, 7, 420)]


def test_memory_is_bounded(raw: Any, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_MOST_QUEUES", 3)
    monkeypatch.setattr(watching, "_MOST_TENANTS", 3)
    for at in range(10):
        fake_jobs(raw, 1, tenant=f"t{at}", model=f"m{at}")
    found = swept(watch).backlog
    assert found.queues[OTHERS, OTHERS, OTHERS].jobs == found.tenants()[OTHERS].jobs == 7
    assert (len(found.queues), len(found.tenants())) == (4, 4)


@pytest.mark.parametrize("slice_of", [1, 3, 200])
def test_each_job_is_read_once(broker: Broker, raw: Any, monkeypatch: pytest.MonkeyPatch, slice_of: int) -> None:
    monkeypatch.setattr(backlog, "_SLICE", slice_of)
    fake_jobs(raw, 4)
    fake_jobs(raw, 7, score=2_000)
    fake_jobs(raw, 5)
    place: Place | None = START
    read = 0
    while place is not None:
        found = read_slice(broker.connection, place)
        read, place = read + len(found.jobs), found.next
    assert read == 16


def test_while_redis_is_silent_nothing_is_told(own_redis: RedisServer, own_broker: Broker) -> None:
    clock = [100.0]
    watch = Watch(own_broker, now=lambda: clock[0])
    assert (watch.sweep(), watch.reaches_redis) == (None, False)
    watch.look()
    assert watch.reaches_redis
    own_redis.stop()
    watch.look()
    assert not watch.reaches_redis
    assert watch.sweep() is not None  # it may come back soon
    clock[0] += keys.HEARTBEAT_TTL_S + 1
    assert watch.sweep() is None


def test_figures_that_no_sweep_renews_are_withdrawn(broker: Broker, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    watch = Watch(broker, now=lambda: clock[0])
    monkeypatch.setattr(backlog, "_SLICE", 1)
    fake_jobs(raw, 3)
    watch.look()
    for later_s, is_withdrawn in ((watching.STUCK_AFTER_S, False), (1, True)):
        in_the_middle = [read_slice(broker.connection, START)] * 2
        monkeypatch.setattr(watching, "read_slice", Mock(side_effect=[*in_the_middle, BrokerUnavailable("no")]))
        clock[0] += later_s
        watch.look()
        assert (watch.sweep() is None) is is_withdrawn


def test_what_nobody_expects_ends_the_process(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "read_slice", Mock(side_effect=ZeroDivisionError))
    watch = Watch(broker)
    watch.start()
    with pytest.raises(ZeroDivisionError):
        watch.wait()
