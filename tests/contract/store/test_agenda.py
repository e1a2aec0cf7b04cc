"""When the reaper looks at each job, that it looks at no others, and that no job costs another its look."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from redis import Redis

from embedctl.jobs.job import Job
from embedctl.queueing import reaper
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.store import WorkerRow, agenda
from embedctl.store.upkeep import ActiveJob, Looked, Upkeep
from embedctl_config import keys
from embedctl_config.errors import BrokerFull, BrokerRefused, BrokerUnavailable, WaitTimeout
from embedctl_config.settings import Settings
from embedctl_config.tenants import DEFAULT
from embedctl_workers.serving.heartbeat import Heartbeat
from embedctl_workers.serving.in_hand import Held, InHand
from tests.support.clocks import MovedClock
from tests.support.store import (
    QUEUE,
    add,
    claim,
    complete,
    lapse,
    leases,
    members,
    new_job,
    pass_ms,
    reaped,
    row,
    score,
    take,
    work,
)
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.usefixtures("old_redis")

NOW, SOON = 0, keys.LOOK_AFTER_S * 1000
#: A time limit that no test reaches by itself.
LONG_S = 3600.0


def due_in_ms(broker: Broker, raw: Redis, job_id: str) -> float:
    return score(raw, keys.UPKEEP, job_id) - broker.connection.now_ms()


def make_due(raw: Redis, *job_ids: str) -> None:
    for job_id in job_ids:
        raw.zadd(keys.UPKEEP, {job_id: 1})


def postpone(broker: Broker, raw: Redis, *job_ids: str) -> None:
    """As if nothing of these jobs were due for an hour."""
    for job_id in job_ids:
        raw.zadd(keys.UPKEEP, {job_id: broker.connection.now_ms() + 3_600_000})


def lapsed_job(broker: Broker, raw: Redis) -> str:
    """A job of one chunk, the lease of which has lapsed."""
    job_id = new_job(broker, 1)
    claim(broker, job_id, 0)
    lapse(raw, job_id, 0)
    return job_id


def reap(broker: Broker, raw: Redis, **options: float) -> Reaper:
    raw.delete(keys.REAPER)
    one = Reaper(broker, **options)
    one.round()
    return one


@dataclass
class Looks:
    jobs: list[str] = field(default_factory=list)
    before: Callable[[], object] = lambda: None


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    found, look = Looks(), Upkeep.look

    def noted(self: Upkeep, jobs: Sequence[ActiveJob], **options: Any) -> list[Looked | BrokerRefused]:
        found.jobs.extend(job.id for job in jobs)
        found.before()
        return look(self, jobs, **options)

    monkeypatch.setattr(Upkeep, "look", noted)
    return found


def released(broker: Broker, job_id: str) -> None:
    claim(broker, job_id, 0)
    broker.jobs.release(job_id, 0, "t", delay_s=1)


def stopped(broker: Broker, job_id: str) -> None:
    claim(broker, job_id, 0)
    complete(broker, job_id, 0, failed=2)


def without_text(broker: Broker, job_id: str) -> None:
    broker.jobs.drop_input(job_id, 0)
    take(broker)


@pytest.mark.parametrize(
    ("step", "within_ms"),
    [
        (lambda broker, job_id: add(broker, job_id, 2), SOON),
        (lambda broker, job_id: broker.jobs.seal(job_id, 2), SOON),
        (lambda broker, job_id: claim(broker, job_id, 0), SOON),
        (released, 1000),
        (lambda broker, job_id: work(broker, job_id, 0), SOON),
        (lambda broker, job_id: broker.jobs.cancel(job_id), NOW),
        (stopped, NOW),
        (without_text, NOW),
    ],
    ids="add seal claim release complete cancel budget lost".split(),  # noqa: SIM905
)
def test_steps_bring_a_look(broker: Broker, raw: Redis, step: Callable[[Broker, str], object], within_ms: int) -> None:
    job_id = new_job(broker, 2, seal=False, max_errors=1)
    postpone(broker, raw, job_id)
    step(broker, job_id)
    assert due_in_ms(broker, raw, job_id) <= within_ms
    assert raw.pttl(keys.UPKEEP) > 0


@pytest.mark.parametrize(("budget_s", "looked_at"), [(0.0, [2, 4, 6]), (LONG_S, [6, 6, 6])])
def test_a_round_stops_when_its_time_is_over_and_the_next_process_goes_on(
    settings: Settings,
    broker: Broker,
    raw: Redis,
    looks: Looks,
    monkeypatch: pytest.MonkeyPatch,
    budget_s: float,
    looked_at: list[int],
) -> None:
    monkeypatch.setattr(reaper, "_TOGETHER", 2)
    monkeypatch.setattr(reaper, "BUDGET_S", budget_s)
    jobs = [new_job(broker, 1) for _ in range(6)]
    for at, job_id in enumerate(jobs):
        raw.zadd(keys.UPKEEP, {job_id: at + 1})
    for count in looked_at:
        other = Broker.connect(settings)
        reap(other, raw, interval_s=60)
        other.close()
        assert looks.jobs == jobs[:count]


def test_the_turn_is_kept_until_the_round_ends(settings: Settings, broker: Broker, raw: Redis, looks: Looks) -> None:
    other, taken = Broker.connect(settings), []

    def slow() -> None:
        pass_ms(broker, 100)  # ten intervals
        taken.append(other.upkeep.agenda.take_turn(1.0))

    looks.before = slow
    make_due(raw, new_job(broker, 1))
    reap(broker, raw, interval_s=0.01)
    assert taken == [""]
    eventually(lambda: other.upkeep.agenda.take_turn(1.0))
    other.close()


def test_who_lost_the_turn_stops(broker: Broker, raw: Redis, looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "_TOGETHER", 1)
    looks.before = lambda: raw.set(keys.REAPER, "another", px=600_000)
    make_due(raw, *(new_job(broker, 1) for _ in range(3)))
    reap(broker, raw)
    assert len(looks.jobs) == 1
    assert raw.get(keys.REAPER) == b"another"
    assert raw.pttl(keys.REAPER) > 0


@pytest.mark.parametrize(
    ("took_s", "error", "rests"),
    [
        (300.0, None, False),
        (300.25, None, True),  # Redis stood still, so owners are as late as this process
        (0.0, BrokerUnavailable("it is away"), True),
        (0.0, BrokerRefused("one key"), False),
    ],
)
def test_after_an_outage_owners_are_given_time_to_come_back(
    broker: Broker,
    raw: Redis,
    looks: Looks,
    monkeypatch: pytest.MonkeyPatch,
    took_s: float,
    error: Exception | None,
    rests: bool,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(reaper, "_now", lambda: clock[0])
    one = Reaper(broker)
    make_due(raw, new_job(broker, 1))

    def take_turn(_: agenda.Agenda, held_s: float) -> str:
        clock[0] += took_s
        if error is not None:
            raise error
        return "turn"

    with monkeypatch.context() as patch, suppress(BrokerUnavailable):
        patch.setattr(agenda.Agenda, "take_turn", take_turn)
        one.round()
    assert bool(looks.jobs) is (not rests and error is None)
    clock[0] += 5
    raw.delete(keys.REAPER)
    one.round()
    assert raw.exists(keys.REAPER) == (not rests)


def test_a_round_begins_nothing_after_the_deadline_of_who_waits(
    broker: Broker, observed: Broker, trips: Sized, monkeypatch: pytest.MonkeyPatch, clock: MovedClock
) -> None:
    Reaper(observed).round(time.monotonic())
    assert len(trips) == 0
    rounds: list[tuple[float, float | None]] = []

    def noted(self: Reaper, deadline: float | None = None) -> None:
        rounds.append((time.monotonic(), deadline))
        if len(rounds) == 3:
            clock.move(LONG_S)

    monkeypatch.setattr(Reaper, "round", noted)
    job = Job(new_job(broker, 1), broker)
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        job.wait(timeout=LONG_S)
    first = rounds[0][0]  # the wait began between these two
    assert all(deadline is not None and began + LONG_S <= deadline <= first + LONG_S for _, deadline in rounds)


def spoil(broker: Broker, raw: Redis, kind: str) -> str:
    """A job that a round can't look after: another program has changed this fact of it, or has its key."""
    if kind == "queue":
        job_id, key = new_job(broker, 1, hardware="cpu"), keys.queue("cpu", "dummy")
    elif kind == "retry":  # of a failed record, by a process that died
        job_id = new_job(broker, 1)
        work(broker, job_id, 0, failed=1)
        broker.jobs.retry(job_id, 0, 1, "dead")
        raw.delete(keys.producer(job_id))
        key = keys.events(job_id)
    else:
        job_id = lapsed_job(broker, raw)
        if kind in ("state", "version"):
            raw.hset(keys.job(job_id), kind, "99")
            return job_id
        key = getattr(keys, kind)(job_id)
    raw.delete(key)
    raw.set(key, "another program's", px=100_000)
    return job_id


@pytest.mark.parametrize("kind", "owners job ready cursors events state version retry queue".split())  # noqa: SIM905
def test_a_job_that_can_not_be_looked_after_is_put_off_and_costs_no_other_its_look(
    broker: Broker, raw: Redis, kind: str
) -> None:
    broker.workers.beat(row())
    bad, good = spoil(broker, raw, kind), lapsed_job(broker, raw)
    make_due(raw, bad, good)
    began_ms = broker.connection.now_ms()
    one = reap(broker, raw, interval_s=0.001)
    assert broker.jobs.status(good).lapsed == 1
    assert due_in_ms(broker, raw, good) > 0
    put_off_to_ms = score(raw, keys.UPKEEP, bad)
    # The pause is of this process' clock, the time of Redis'. One is read up to as much later as all of this takes.
    assert began_ms + 59_900 - (broker.connection.now_ms() - began_ms) <= put_off_to_ms
    raw.delete(keys.REAPER)
    one._asked = None  # it did not stand still
    pass_ms(broker, 10)
    one.round()  # the sweep brings it forward, but it is not tried again before its time
    now_ms = broker.connection.now_ms()
    assert put_off_to_ms - 100 - (now_ms - began_ms) <= score(raw, keys.UPKEEP, bad) <= now_ms + 60_000


def test_a_job_is_tried_again_ever_later_and_forgiven_when_it_is_well(
    broker: Broker, raw: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(reaper, "_now", lambda: clock[0])
    job_id = lapsed_job(broker, raw)
    owners = keys.owners(job_id)
    raw.delete(owners)
    raw.set(owners, "damaged", px=100_000)
    one = Reaper(broker, interval_s=1)
    for hours in range(1, 9):
        raw.delete(keys.REAPER)
        make_due(raw, job_id)
        one._asked = None  # it did not stand still
        one.round()
        clock[0] = hours * 3600
    waits = [int(line.split("again in ")[1].split(" ")[0]) for line in caplog.messages if "again in" in line]
    assert waits == [60, 120, 240, 480, 960, 1800, 1800, 1800]
    raw.delete(owners, keys.REAPER)
    make_due(raw, job_id)
    one._asked = None
    one.round()
    assert one._troubles == {}


def test_a_job_without_progress_is_looked_at_ever_less(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1, ttl_s=1_000_000)
    for rested_s, wait_s in ((1, 59), (61, 61), (600, 600), (7200, 1800)):
        began = broker.connection.now_ms()
        raw.hset(keys.job(job_id), "progressed_ms", began - rested_s * 1000)
        make_due(raw, job_id)
        reap(broker, raw)
        took_ms = broker.connection.now_ms() - began  # the job has rested for as much longer, and is looked at later
        assert 0 <= score(raw, keys.UPKEEP, job_id) - began - wait_s * 1000 <= 2 * took_ms


def test_the_sweep_puts_in_what_is_missing_and_late_and_leaves_the_rest(broker: Broker, raw: Redis) -> None:
    late = new_job(broker, 2, tenant="search")
    for chunk, end_ms in ((0, 7), (1, 3)):
        claim(broker, late, chunk, f"t{chunk}")
        lapse(raw, late, chunk, at_ms=end_ms)
    spoilt, unreadable = (lapsed_job(broker, raw) for _ in range(2))
    missing, rests, gone = (new_job(broker, 1) for _ in range(3))
    postpone(broker, raw, late, spoilt, unreadable)
    before = {job_id: score(raw, keys.UPKEEP, job_id) for job_id in (rests, unreadable)}
    raw.hset(keys.owners(spoilt), 0, "token a host with blanks")
    raw.delete(keys.owners(unreadable), keys.job(gone))
    raw.set(keys.owners(unreadable), "no hash", ex=1000)
    raw.zrem(keys.UPKEEP, missing, gone)
    now_ms = broker.connection.now_ms()
    found = broker.upkeep.agenda.sweep(now_ms)
    assert sorted(found) == sorted(
        [(late, "search"), *((each, DEFAULT) for each in (spoilt, unreadable, missing, rests))]
    )
    looks = {job_id: raw.zscore(keys.UPKEEP, job_id) for job_id in (late, spoilt, missing, rests, unreadable, gone)}
    assert looks == {late: 3, spoilt: 0, missing: now_ms, **before, gone: None}
    assert raw.zscore(keys.ACTIVE, gone) is None
    assert reaped(broker, spoilt) == [0]


def test_sweeps_go_by_slices(settings: Settings, broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agenda, "_SWEPT", 2)
    for _ in range(5):
        new_job(broker, 1)
    raw.delete(keys.UPKEEP)  # as Redis may come back
    found = []
    for _ in range(3):
        other = Broker.connect(settings)
        other.upkeep.agenda.sweep(other.connection.now_ms())
        other.close()
        found.append(raw.zcard(keys.UPKEEP))
    assert found == [2, 4, 5]
    active_ms = raw.pttl(keys.ACTIVE)
    assert 0 < raw.pttl(keys.UPKEEP) <= active_ms + 1000
    raw.delete(keys.UPKEEP)
    broker.upkeep.agenda.sweep(broker.connection.now_ms())
    assert raw.zcard(keys.UPKEEP) == 2  # from the beginning again


def test_names_of_jobs_that_are_gone_go(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agenda, "_NAMES", 5)
    jobs = [new_job(broker, 1) for _ in range(8)]
    for at, job_id in enumerate(jobs):
        raw.zadd(keys.JOBS, {job_id: 100 + at})
    raw.zadd(keys.JOBS, {f"20200101-000000-{number:010d}": number for number in range(20)})  # the oldest
    raw.zadd(keys.JOBS, {f"20210101-000000-{number:010d}": 200 + number for number in range(20)})
    sizes = []
    for _ in range(40):
        in_use = broker.upkeep.agenda.drop_names()
        sizes.append(raw.zcard(keys.JOBS))
    assert sizes[0] <= 43
    assert all(before - after <= 10 for before, after in pairwise(sizes))
    assert sizes[-1] == 8
    assert members(raw, keys.JOBS) == jobs
    assert in_use == {QUEUE}


def test_a_reaper_may_hang(broker: Broker, raw: Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, release = threading.Event(), threading.Event()

    def hang(self: Reaper, deadline: float | None = None) -> None:
        hangs.set()
        release.wait()

    monkeypatch.setattr(Reaper, "round", hang)
    quick = Broker.connect(settings.replace(lease_s=0.5))
    job_id = new_job(quick, 1)
    in_hand = InHand()
    in_hand.take(Held(job_id, 0, "t", "dummy"))
    claim(quick, job_id, 0)
    beating = Heartbeat(quick, in_hand, row, lambda: None)
    beating.start()
    try:
        assert hangs.wait(PATIENCE_S)
        hung, leased = beating.reaped_at, leases(raw, job_id)[0]
        reached, moved = beating.reached_at, beating.moved_at
        eventually(lambda: beating.reached_at > reached and leases(raw, job_id)[0] > leased + 500)
        assert beating.alive
        eventually(lambda: beating.moved_at > moved)
        assert beating.reaped_at == hung  # which is seen from outside
    finally:
        release.set()
        beating.stop()
        quick.close()


def test_one_lease_that_can_not_be_renewed_costs_no_other(broker: Broker, raw: Redis) -> None:
    in_hand, before = InHand(), []
    for at in range(2):
        job_id = lapsed_job(broker, raw)
        in_hand.take(Held(job_id, 0, "t", "dummy"))
        before.append(job_id)
        if at == 0:
            raw.delete(keys.owners(job_id))
            raw.set(keys.owners(job_id), "no hash", ex=1000)
    heartbeat = Heartbeat(broker, in_hand, row, lambda: None)
    heartbeat._renew()
    assert leases(raw, before[1])[0] > 1


def test_a_state_is_logged_once_and_again_when_it_ends(
    broker: Broker, raw: Redis, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    quick = Broker.connect(settings.replace(lease_s=0.5))
    tried: list[None] = []

    def described() -> WorkerRow:
        tried.append(None)
        return row()

    beating = Heartbeat(quick, InHand(), described, lambda: None, reaps=False)
    beating.start()
    try:
        raw.config_set("maxmemory", 1)
        before = len(tried)
        eventually(lambda: len(tried) > before + 5)
        raw.config_set("maxmemory", 0)
        eventually(lambda: "heartbeat: goes on" in caplog.messages)
    finally:
        raw.config_set("maxmemory", 0)
        beating.stop()
        quick.close()
    assert [" is full (" in line for line in caplog.messages if line.startswith("heartbeat: ")] == [True, False]


def test_ended_jobs_stand_behind_living_ones(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and however little time."""
    monkeypatch.setattr(reaper, "BUDGET_S", 0.0)
    monkeypatch.setattr(reaper, "_TOGETHER", 3)
    broker.workers.beat(row())
    large = [new_job(broker, 17) for _ in range(3)]
    for job_id in large:
        work(broker, job_id, *range(17))
    good = lapsed_job(broker, raw)
    raw.zadd(keys.UPKEEP, {**dict.fromkeys(large, 1), good: 2})
    for _ in range(2):
        reap(broker, raw)
    assert broker.jobs.status(good).lapsed == 1


def test_a_full_redis_is_freed_and_the_reaper_rests(own_broker: Broker, own_raw: Redis) -> None:
    broker, raw = own_broker, own_raw
    job_id = new_job(broker, 17, ttl_s=100.0)
    work(broker, job_id, *range(17))
    cancelled = new_job(broker, 1)
    broker.jobs.cancel(cancelled)
    assert raw.pttl(keys.chunk_result(job_id, 0)) > 1_000_000
    raw.config_set("maxmemory", 1)
    one = Reaper(broker)
    with pytest.raises(BrokerFull):
        one.round()
    assert raw.pttl(keys.chunk_result(job_id, 0)) <= 125_000
    assert not raw.exists(keys.chunk_input(cancelled, 0))
    assert one._rests_until > 0
    assert one._troubles == {}
