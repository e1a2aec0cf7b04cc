"""Heartbeats: which workers are alive, on which queues, and which no longer count."""

from __future__ import annotations

import pytest
import redis as redis_py

from embedctl.broker import Broker
from embedctl.routing import resolve
from embedctl.store import ServedModel, workers
from embedctl.store.workers import Offer
from embedctl_config import keys
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from tests.support.store import DIM, MINE, QUEUE, row


def expire(broker: Broker, raw: redis_py.Redis, instance: str, *queues: str) -> None:
    """Make the worker's last heartbeat so old that it no longer counts."""
    for members in (keys.WORKERS, *map(keys.queue_workers, queues)):
        raw.zadd(members, {instance: broker.connection.now_ms() - 1})


def test_a_beat_says_all_about_a_worker(broker: Broker) -> None:
    mine = row("w", "a", "b/c", holding=(("job", 3), ("job", 4)), progressed_ms=17)
    broker.workers.beat(mine)
    assert list(broker.workers.alive()) == [mine]


def test_a_worker_counts_on_each_of_its_queues(broker: Broker) -> None:
    broker.workers.beat(row("w1", "a", "b"))
    broker.workers.beat(row("w2", "b"))
    broker.workers.beat(row("w3", "b", hardware="other"))
    counts = {
        name: broker.workers.count(keys.queue(*name.split())) for name in ("dummy a", "dummy b", "other b", "x y")
    }
    assert counts == {"dummy a": 1, "dummy b": 2, "other b": 1, "x y": 0}


@pytest.mark.parametrize("ended", ["left", "its beat ran out", "its heartbeat is gone"])
def test_a_worker_that_is_not_alive_no_longer_counts(broker: Broker, raw: redis_py.Redis, ended: str) -> None:
    mine = row("mine")
    for worker in (mine, row("other")):
        broker.workers.beat(worker)
    if ended == "left":
        broker.workers.leave(mine)
        assert not raw.exists(keys.heartbeat("mine"))
    elif ended == "its beat ran out":
        expire(broker, raw, "mine", QUEUE)
    else:
        raw.delete(keys.heartbeat("mine"))
    assert [worker.instance for worker in broker.workers.alive()] == ["other"]
    assert broker.workers.count(QUEUE) == (2 if ended == "its heartbeat is gone" else 1)


def test_the_next_beat_of_anybody_sweeps_the_dead_away(broker: Broker, raw: redis_py.Redis) -> None:
    broker.workers.beat(row("dead"))
    expire(broker, raw, "dead", QUEUE)
    broker.workers.beat(row("live"))
    assert raw.zrange(keys.queue_workers(QUEUE), 0, -1) == [b"live"]
    assert raw.zrange(keys.WORKERS, 0, -1) == [b"dead", b"live"]  # remembered for a while, to say that it is gone
    assert [each.worker.instance for each in broker.workers.gone()] == ["dead"]
    raw.zadd(keys.WORKERS, {"dead": broker.connection.now_ms() - keys.GONE_TTL_S * 1000 - 10})
    broker.workers.beat(row("live"))
    assert raw.zrange(keys.WORKERS, 0, -1) == [b"live"]


def test_heartbeats_and_their_lists_end_by_themselves(broker: Broker, raw: redis_py.Redis) -> None:
    broker.workers.beat(row())
    for key in (keys.heartbeat("w"), keys.WORKERS, keys.queue_workers(QUEUE), keys.machine("here")):
        assert keys.HEARTBEAT_TTL_S < raw.ttl(key) <= keys.GONE_TTL_S


def test_a_worker_that_beats_during_a_look_counts_once_and_hides_no_other(
    broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_SLICE", 2)
    for number in range(7):
        broker.workers.beat(row(f"w{number}"))
        raw.zincrby(keys.WORKERS, number, f"w{number}")
    seen = []
    for worker in broker.workers.alive():
        seen.append(worker.instance)
        broker.workers.beat(row(worker.instance))
        raw.zincrby(keys.WORKERS, 100, worker.instance)
    assert sorted(seen) == [f"w{number}" for number in range(7)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_workers_that_beat_in_the_same_millisecond_are_all_read(
    count: int, broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_SLICE", 2)
    until = broker.connection.now_ms() + 600_000
    instances = [f"w{number}" for number in range(count)]
    for instance in instances:
        broker.workers.beat(row(instance))
        raw.zadd(keys.WORKERS, {instance: until})
    assert sorted(worker.instance for worker in broker.workers.alive()) == instances


def classes(settings: Settings) -> Settings:
    return settings.replace(
        classes={**settings.classes, "fast": HardwareClass(), "half": HardwareClass(precision="fp16")}
    )


def served(rate: float) -> dict[str, ServedModel]:
    return {"m": ServedModel(MINE, DIM, rate)}


def test_auto_takes_the_class_whose_live_workers_are_fastest_together(broker: Broker, settings: Settings) -> None:
    several = classes(settings)
    broker.workers.beat(row("a", hardware="cpu", models=served(60)))
    broker.workers.beat(row("b", hardware="cpu", models=served(60)))
    broker.workers.beat(row("c", hardware="fast", models=served(100)))
    broker.workers.beat(row("d", hardware="half", models=served(1000), precision="fp16"))
    broker.workers.beat(row("e", hardware="unknown", models=served(1000)))
    assert resolve(several, broker.workers, model="m", hardware="auto", precision=None) == ("cpu", "fp32")
    assert resolve(several, broker.workers, model="m", hardware="auto", precision="fp16") == ("half", "fp16")
    assert resolve(several, broker.workers, model="other", hardware="auto", precision=None) == ("cpu", "fp32")


@pytest.mark.parametrize("ended", ["left", "died", "fell silent"])
def test_a_job_that_comes_while_workers_are_started_anew_goes_to_their_class(
    ended: str, broker: Broker, settings: Settings, raw: redis_py.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    several = classes(settings)
    mine = row("a", hardware="fast", models=served(60))
    broker.workers.beat(mine)
    broker.workers.beat(row("b", "other", hardware="cpu"))
    queue = keys.queue("fast", "m")
    if ended == "left":
        broker.workers.leave(mine)
    elif ended == "died":
        broker.workers.report_death("a", "killed")
    else:
        expire(broker, raw, "a", queue)
    assert broker.workers.count(queue) == 0
    assert list(broker.workers.alive(queue)) == []
    assert resolve(several, broker.workers, model="m", hardware="auto", precision=None) == ("fast", "fp32")
    (record,) = caplog.records
    assert "no live worker serves m in fp32: the job goes to class fast, whose workers left" in record.getMessage()
    assert record.getMessage().endswith("Start one: embedctl worker --class fast --model m")
    assert 0 < raw.ttl(keys.queue_workers(queue)) <= keys.GONE_TTL_S


def test_with_nobody_known_it_goes_to_cpu_and_says_so(
    broker: Broker, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    several = classes(settings)
    broker.workers.beat(row("a", hardware="half", models=served(60), precision="fp16"))
    assert resolve(several, broker.workers, model="m", hardware="auto", precision=None) == ("cpu", "fp32")
    (record,) = caplog.records
    assert "to class cpu, because no other class is known to have workers, and stays there" in record.getMessage()


def test_one_that_is_alive_is_taken_before_one_that_left_and_nothing_is_said(
    broker: Broker, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    several = classes(settings)
    left = row("a", hardware="fast", models=served(600))
    broker.workers.beat(left)
    broker.workers.beat(row("b", hardware="cpu", models=served(6)))
    broker.workers.leave(left)
    assert resolve(several, broker.workers, model="m", hardware="auto", precision=None) == ("cpu", "fp32")
    assert not caplog.records


def test_a_class_that_does_not_offer_the_precision_is_refused(broker: Broker, settings: Settings) -> None:
    several = classes(settings)
    assert resolve(several, broker.workers, model="m", hardware="half", precision=None) == ("half", "fp16")
    with pytest.raises(SettingsError, match="offers precision fp16, not fp32"):
        resolve(several, broker.workers, model="m", hardware="half", precision="fp32")
    with pytest.raises(SettingsError, match="fp8"):
        resolve(several, broker.workers, model="m", hardware="half", precision="fp8")
    with pytest.raises(SettingsError, match="no hardware class 'gone'"):
        resolve(several, broker.workers, model="m", hardware="gone", precision=None)


def test_what_workers_offer_is_read_again_in_time(
    broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert broker.workers.offers() == {}
    broker.workers.beat(row("w1"))
    assert broker.workers.offers() == {("dummy", "dummy", "fp32"): Offer(100.0, DIM)}  # not what was not there
    monkeypatch.setattr(workers, "OFFERS_S", 0.0)
    broker.workers._offers_until = 0.0
    broker.workers.beat(row("w2"))
    assert broker.workers.offers() == {("dummy", "dummy", "fp32"): Offer(200.0, DIM, workers=2)}
    for instance in ("w1", "w2"):
        expire(broker, raw, instance, QUEUE)
    assert broker.workers.offers() == {}
