"""Heartbeats: which workers are alive, on which queues, which no longer count, and what a supervisor is told."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from redis import Redis

from embedctl.common.machine import machine_id, process_id
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.queueing.routing import no_worker_for, resolve
from embedctl.store import ServedModel, Starting, WorkerRow, workers
from embedctl.store.workers import Offer
from embedctl.waiting import overview
from embedctl.waiting.overview import Gatherer
from embedctl_config import keys
from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from embedctl_workers.serving.health import Announcement, Health
from embedctl_workers.supervising import registry_link
from embedctl_workers.supervising.registry_link import RegistryLink
from tests.support.redis_server import RedisServer
from tests.support.store import DIM, MINE, QUEUE, Trips, calls, claim, new_job, row, score, some
from tests.support.waiting import eventually


def expire(broker: Broker, raw: Redis, instance: str, *queues: str) -> None:
    for members in (keys.WORKERS, *map(keys.queue_workers, queues)):
        raw.zadd(members, {instance: broker.connection.now_ms() - 1})


def test_a_beat_says_all_about_a_worker_and_ends_by_itself(broker: Broker, raw: Redis) -> None:
    mine = row("w", "a", "b/c", holding=(("job", 3), ("job", 4)), progressed_ms=17)
    broker.workers.beat(mine)
    assert list(broker.workers.alive()) == [mine]
    for key in (keys.heartbeat("w"), keys.WORKERS, keys.queue_workers(keys.queue("dummy", "a")), keys.machine("here")):
        assert keys.HEARTBEAT_TTL_S < raw.ttl(key) <= keys.GONE_TTL_S


def test_a_worker_counts_on_each_of_its_queues(broker: Broker) -> None:
    broker.workers.beat(row("w1", "a", "b"))
    broker.workers.beat(row("w2", "b"))
    broker.workers.beat(row("w3", "b", hardware="other"))
    queues = [("dummy", "a"), ("dummy", "b"), ("other", "b"), ("x", "y")]
    assert [broker.workers.count(keys.queue(*queue)) for queue in queues] == [1, 2, 1, 0]


@pytest.mark.parametrize("ended", ["left", "its beat ran out", "its heartbeat is gone"])
def test_a_worker_that_is_not_alive_no_longer_counts(broker: Broker, raw: Redis, ended: str) -> None:
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


def test_the_next_beat_of_anybody_sweeps_the_dead_away(broker: Broker, raw: Redis) -> None:
    broker.workers.beat(row("dead"))
    expire(broker, raw, "dead", QUEUE)
    broker.workers.beat(row("live"))
    assert raw.zrange(keys.queue_workers(QUEUE), 0, -1) == [b"live"]
    assert raw.zrange(keys.WORKERS, 0, -1) == [b"dead", b"live"]  # remembered for a while, to say that it is gone
    assert [each.worker.instance for each in broker.workers.gone()] == ["dead"]
    raw.zadd(keys.WORKERS, {"dead": broker.connection.now_ms() - keys.GONE_TTL_S * 1000 - 10})
    broker.workers.beat(row("live"))
    assert raw.zrange(keys.WORKERS, 0, -1) == [b"live"]


def test_a_worker_that_beats_meanwhile_counts_once(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_workers_of_one_millisecond_are_all_read(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SLICE", 2)
    until = broker.connection.now_ms() + 600_000
    instances: list[str] = []
    for number in range(7):
        instances.append(f"w{number}")
        broker.workers.beat(row(instances[-1]))
        raw.zadd(keys.WORKERS, {instances[-1]: until})
        assert sorted(worker.instance for worker in broker.workers.alive()) == instances


@pytest.fixture
def route(broker: Broker, settings: Settings) -> Callable[..., tuple[str, str]]:
    """Finds the class and the precision of a job."""
    several = {**settings.classes, "fast": HardwareClass(), "half": HardwareClass(precision="fp16")}
    mine = settings.replace(classes=several)
    return lambda model="m", hardware="auto", precision=None: resolve(
        mine, broker.workers, model=model, hardware=hardware, precision=precision
    )


def served(rate: float) -> dict[str, ServedModel]:
    return {"m": ServedModel(MINE, DIM, rate)}


def test_auto_takes_the_class_whose_live_workers_are_fastest_together(
    broker: Broker, route: Callable[..., tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    broker.workers.beat(row("a", hardware="cpu", models=served(60)))
    broker.workers.beat(row("b", hardware="cpu", models=served(60)))
    broker.workers.beat(row("c", hardware="fast", models=served(100)))
    broker.workers.beat(row("d", hardware="half", models=served(1000), precision="fp16"))
    broker.workers.beat(row("e", hardware="unknown", models=served(1000)))
    assert route() == ("cpu", "fp32")
    assert route(precision="fp16") == ("half", "fp16")
    assert not caplog.records
    assert route("other") == ("cpu", "fp32")
    assert "to class cpu, because no other class is known to have workers, and stays there" in caplog.text
    broker.workers.not_ready.tell("x", Starting("fast:0@host", "fast", ["new"], "loading new", 0))
    assert route("new") == ("fast", "fp32")
    assert "to class fast, whose workers are starting, and stays there" in caplog.text


@pytest.mark.parametrize("ended", ["left", "died", "fell silent"])
def test_a_job_that_comes_while_workers_are_started_anew_goes_to_their_class(
    ended: str, broker: Broker, route: Callable[..., tuple[str, str]], raw: Redis, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert route() == ("fast", "fp32")
    (record,) = caplog.records
    assert "no live worker serves m in fp32: the job goes to class fast, whose workers left" in record.getMessage()
    broker.workers.beat(row("c", hardware="cpu", models=served(6)))
    assert route() == ("cpu", "fp32")
    assert 0 < raw.ttl(keys.queue_workers(queue)) <= keys.GONE_TTL_S


def test_a_class_that_does_not_offer_the_precision_is_refused(route: Callable[..., tuple[str, str]]) -> None:
    assert route(hardware="half") == ("half", "fp16")
    for precision, says in (("fp32", "offers precision fp16, not fp32"), ("fp8", "fp8")):
        with pytest.raises(SettingsError, match=says):
            route(hardware="half", precision=precision)
    with pytest.raises(SettingsError, match="no hardware class 'gone'"):
        route(hardware="gone")


def test_what_workers_offer_is_read_again_in_time(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broker.workers.offers() == {}
    broker.workers.beat(row("w1"))
    offer = Offer(100.0, DIM, fingerprints=frozenset({MINE}))
    assert broker.workers.offers() == {("dummy", "dummy", "fp32"): offer}  # not what was not there
    monkeypatch.setattr(workers, "OFFERS_S", 0.0)
    broker.workers._offers_until = 0.0
    broker.workers.beat(row("w2"))
    assert broker.workers.offers() == {("dummy", "dummy", "fp32"): replace(offer, tokens_per_s=200.0, workers=2)}
    for instance in ("w1", "w2"):
        expire(broker, raw, instance, QUEUE)
    assert broker.workers.offers() == {}


def test_an_unreadable_heartbeat_hides_no_other(broker: Broker, raw: Redis, caplog: pytest.LogCaptureFixture) -> None:
    for beat in (b"no JSON", b"{}", b"[1]", b"\xff"):
        for instance in ("w1", "bad", "w2"):
            broker.workers.beat(row(instance))
        raw.set(keys.heartbeat("bad"), beat, keepttl=True)
        assert [worker.instance for worker in broker.workers.alive(QUEUE)] == ["w1", "w2"]
        assert broker.workers.count(QUEUE) == 3
    assert caplog.text.count("the heartbeat of worker bad can't be read") == 1


# Many workers and jobs: nobody reads all of them for a few


def test_the_workers_of_this_machine_are_found_without_reading_the_others(broker: Broker, raw: Redis) -> None:
    for number in range(30):
        broker.workers.beat(row(f"far{number}", machine="another machine"))
    for instance in ("mine", "expired", "left"):
        broker.workers.beat(row(instance, machine=machine_id()))
    raw.zadd(keys.WORKERS, {"expired": broker.connection.now_ms() - 1})
    broker.workers.leave(row("left", machine=machine_id()))
    raw.config_resetstat()
    assert [worker.instance for worker in broker.workers.here()] == ["mine"]
    assert [calls(raw, name) for name in ("get", "mget", "zrangebyscore")] == [2, 0, 0]


def test_a_look_at_many_workers_is_a_few_trips(broker: Broker, observed: Broker, trips: Trips, raw: Redis) -> None:
    job_id = new_job(broker, chunks=1)
    for number in range(1000):
        broker.workers.beat(row(f"w{number}"))
    assert len(Gatherer(observed).look().workers) == 1000
    assert len(trips) <= 11
    trips.clear()
    job = Job(job_id, observed)
    assert (job.status().live_workers, len(job.workers()), job.gone_workers(), job.suspects()) == (1000, 1000, [], [])
    assert len(trips) <= 12
    raw.zadd(keys.WORKERS, {f"w{number}": broker.connection.now_ms() - 1 - number for number in range(100)})
    trips.clear()
    assert len(list(observed.workers.gone())) == 100
    assert len(trips) <= 4


def test_rounds_are_few_trips(old_redis: None, broker: Broker, observed: Broker, trips: Trips, raw: Redis) -> None:
    for number in range(300):
        broker.workers.beat(row(f"w{number}"))
    for jobs in (1, 80):  # the first one has its scripts loaded
        for job_id in [new_job(broker, chunks=1) for _ in range(jobs)]:
            raw.zadd(keys.UPKEEP, {job_id: 1})
        raw.delete(keys.REAPER)
        raw.config_resetstat()
        trips.clear()
        Reaper(observed).round()
    assert calls(raw, "evalsha") >= 80  # each job is looked at
    assert calls(raw, "mget") == 0  # no heartbeat is read
    assert len(trips) <= 36, trips


def test_workers_gone_are_looked_at(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "GONE_LOOKED_AT", 11)
    for number in range(12):
        broker.workers.beat(row(f"w{number}", *(["other"] if number % 3 else [])))
        raw.zadd(keys.WORKERS, {f"w{number}": broker.connection.now_ms() - 1000 * (number + 1)})
    assert len(Gatherer(broker).look().gone) == 11
    # A heartbeat ends a little sooner than its worker's name.
    raw.delete(*(keys.heartbeat(f"w{number}") for number in range(5, 12)))
    assert [each.worker.instance for each in Gatherer(broker).look().gone] == ["w4", "w3", "w2", "w1", "w0"]


def test_offers_of_many_workers_are_kept_longer(broker: Broker) -> None:
    for number in range(250):
        broker.workers.beat(row(f"w{number}"))
    began = time.monotonic()
    broker.workers.offers()
    assert broker.workers._offers_until >= began + 2.5  # a busy machine only makes it later


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def link(broker: Broker) -> Iterator[RegistryLink]:
    link = RegistryLink(broker)
    yield link
    link.close()


def worker(process: subprocess.Popen[bytes]) -> WorkerRow:
    return row(pid=process.pid, machine=machine_id(), process=process_id(process.pid))


def fates(broker: Broker) -> dict[str, str]:
    return {gone.worker.instance: gone.how for gone in broker.workers.gone()}


def test_a_process_is_a_worker_once_it_says_so_and_another_one_of_its_number_is_not_it(
    broker: Broker, link: RegistryLink, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.workers.beat(row(instance="earlier", pid=process.pid, machine=machine_id(), process=f"{process.pid}.1"))
    broker.workers.beat(row(instance="far", pid=process.pid, machine="another", process=process_id(process.pid)))
    looks: list[None] = []
    here = broker.workers.here

    def counted() -> Iterator[WorkerRow]:
        looks.append(None)
        return here()

    monkeypatch.setattr(broker.workers, "here", counted)
    link.expect(process.pid)
    eventually(lambda: len(looks) > 1, what="a second look: the first one came to its end")
    assert link.row_of(process.pid) is None
    broker.workers.beat(worker(process))
    eventually(lambda: link.row_of(process.pid))
    found = some(link.row_of(process.pid))
    assert found.instance == "w"


def test_a_death_is_reported_at_once_and_what_was_held_is_suspect(
    broker: Broker, settings: Settings, link: RegistryLink, process: subprocess.Popen[bytes]
) -> None:
    broker.workers.beat(worker(process))
    link.expect(process.pid)
    eventually(lambda: link.row_of(process.pid))
    lasting = Broker.connect(settings.replace(lease_s=600))  # no lease lapses during the test
    job_id = new_job(lasting)
    claim(lasting, job_id, 0)
    lasting.close()
    broker.workers.beat(replace(worker(process), holding=((job_id, 0),)))
    process.kill()
    process.wait()
    link.report_exit(process.pid, "killed by SIGKILL")
    eventually(lambda: fates(broker))
    assert fates(broker) == {"w": "killed by SIGKILL"}
    eventually(lambda: [suspect.chunk for suspect in broker.jobs.suspects(job_id)] == [0])
    assert broker.workers.witness() == set()  # who looks later has nothing less exact to say
    assert fates(broker) == {"w": "killed by SIGKILL"}


def test_a_worker_that_nobody_blames_has_left(
    broker: Broker, raw: Redis, link: RegistryLink, process: subprocess.Popen[bytes]
) -> None:
    broker.workers.beat(worker(process))
    link.report_exit(process.pid, "")
    eventually(lambda: raw.get(keys.died("w")) == keys.LEFT.encode())
    assert list(broker.workers.alive()) == []
    assert fates(broker) == {}


def test_a_process_that_ended_before_it_was_a_worker_is_looked_for_no_more(
    broker: Broker, link: RegistryLink, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []

    def here() -> Iterator[WorkerRow]:
        looks.append(None)
        return iter([])

    monkeypatch.setattr(broker.workers, "here", here)
    link.expect(process.pid)
    eventually(lambda: looks)
    link.report_exit(process.pid, None)
    eventually(lambda: not link._exits)
    looks.clear()
    link.expect_quarantine([], "q", 0.0)  # it wakes
    eventually(lambda: not link._quarantines)
    assert looks == []


def test_nobody_waits_longer_for_a_quarantine_than_for_a_heartbeat_of_a_supervisor_that_died(
    broker: Broker, raw: Redis, link: RegistryLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_link, "_SAY_EVERY_S", 0.0)

    def until() -> float:
        return score(raw, keys.queue_quarantine("q"), "there")

    began = broker.connection.now_ms()
    link.expect_quarantine(["q"], "there", 120)
    eventually(lambda: raw.zcard(keys.queue_quarantine("q")))
    first = until()
    eventually(lambda: until() > first)  # as long as it lives, it says so again
    assert began + 15_000 <= first < until() <= broker.connection.now_ms() + 15_000
    link.expect_quarantine(["q"], "there", 0)
    eventually(lambda: until() <= broker.connection.now_ms())
    assert not link._awaited


def test_a_worker_that_does_not_run_is_shown_with_the_reason_until_it_runs(broker: Broker, link: RegistryLink) -> None:
    job_id = new_job(broker)
    told = broker.workers.not_ready
    for place, why in (("one", "given up: it broke"), ("two", "starts again after 8 s: killed by SIGKILL")):
        link.say_why_not(place, why, "dummy:0@host", "dummy", ["dummy"])
    told.tell("x", Starting("gpu:0@host", "gpu", ["m"], "loading m", 0))
    eventually(lambda: len(told.all()) == 3)
    assert broker.workers.starting("dummy", "dummy") == [f"{each.name}: {each.doing}" for each in told.all()[:2]]
    status = Job(job_id, broker).status()
    assert no_worker_for(status) == (
        "No worker that serves dummy on dummy is ready. dummy:0@host: given up: it broke; "
        "dummy:0@host: starts again after 8 s: killed by SIGKILL"
    )
    link.say_why_not("two", "", "dummy:0@host", "dummy", ["dummy"])
    eventually(lambda: [each.name for each in told.all()] == ["dummy:0@host", "gpu:0@host"])
    link.close()
    assert [each.name for each in told.all()] == ["gpu:0@host"]


def test_a_worker_that_is_killed_before_it_is_ready_is_soon_shown_no_more(broker: Broker, raw: Redis) -> None:
    told = broker.workers.not_ready
    told.tell("dead", Starting("cpu:0@host", "cpu", ["m"], "loading m", 0))
    assert 0 < raw.ttl(keys.starting("dead")) <= keys.HEARTBEAT_TTL_S
    raw.zadd(keys.STARTING, {"dead": broker.connection.now_ms() - 1, "odd": broker.connection.now_ms() + 9_000})
    raw.set(keys.starting("odd"), "[]")
    assert told.all() == []
    told.tell("live", Starting("cpu:1@host", "cpu", ["m"], "loading m", 0))
    assert raw.zrange(keys.STARTING, 0, -1) == [b"odd", b"live"]
    told.end("live")
    assert told.all() == []


def test_a_death_is_reported_when_redis_is_back(
    own_redis: RedisServer, own_broker: Broker, process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    broker = own_broker
    link = RegistryLink(broker)
    try:
        broker.workers.beat(worker(process))
        link.expect(process.pid)
        eventually(lambda: link.row_of(process.pid))
        own_redis.stop()
        link.report_exit(process.pid, "killed by SIGKILL")
        eventually(lambda: "can't be looked up" in caplog.text)
        own_redis.start()
        eventually(lambda: fates(broker))
        assert fates(broker) == {"w": "killed by SIGKILL"}
    finally:
        link.close()


def test_a_worker_that_ends_before_it_is_ready_is_shown_with_the_reason_until_another_starts(broker: Broker) -> None:
    def announced() -> Announcement:
        return Announcement(broker, Health(), "dummy:0@host", "dummy", ["dummy"])

    with pytest.raises(ModelError), announced().telling_why_not():
        raise ModelError("the accuracy gate failed: model m\nand a table")
    told = broker.workers.not_ready
    assert [each.doing for each in told.all()] == ["did not start: the accuracy gate failed: model m"]
    another = announced()
    eventually(lambda: [each.doing for each in told.all()] == ["starting"])
    another.close()
    assert told.all() == []
