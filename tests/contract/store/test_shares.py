"""Tenants, lanes and jobs that wait for the same workers take turns. Counted in chunks and in work, not timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Claimant, Given
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_config.tenants import TenantEntry
from tests.support.shares import LARGE, Workers, add_chunk, job_of
from tests.support.store import MINE, OTHER, QUEUE, keys_of, new_job, score, some, spec, take

RIGHT = Claimant("w", MINE, "fp32")


def state_weight(broker: Broker, tenant: str, weight: float) -> None:
    broker.quotas.state(tenant, TenantEntry(weight=weight), by="w", since_ms=1)


@pytest.mark.parametrize(
    ("one", "others", "count", "share"),
    [
        pytest.param({"chunks": 90}, {"chunks": 6}, 15, 0.5, id="many jobs of a tenant"),
        pytest.param({"chunks": 220, "size": 100}, {"chunks": 6, "size": 100}, 20, 0.5, id="many jobs of small chunks"),
        pytest.param({"chunks": 50, "size": 3 * LARGE}, {"chunks": 90}, 1, 0.5, id="texts of other lengths"),
        pytest.param({"chunks": 90}, {"chunks": 30, "lane": "interactive"}, 4, 0.5, id="interactive jobs"),
    ],
)
def test_who_has_which_share(
    broker: Broker, one: dict[str, Any], others: dict[str, Any], count: int, share: float
) -> None:
    workers = Workers(broker)
    jobs = [job_of(broker, "x", **one), *(job_of(broker, "y", **others) for _ in range(count))]
    workers.run(80)
    assert workers.share(jobs[:1]) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(("stated", "own", "share"), [(3, None, 0.75), (3, 100.0, 0.75), (3, 1.0, 0.5), (1, 9.0, 0.5)])
def test_a_job_can_only_lower_its_weight(broker: Broker, stated: float, own: float | None, share: float) -> None:
    state_weight(broker, "x", stated)
    workers = Workers(broker)
    mine = job_of(broker, "x", chunks=70, weight=own)
    job_of(broker, "y", chunks=50)
    workers.run(80)
    assert workers.share([mine]) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_shares_are_of_work_however_it_lies_in_chunks(broker: Broker, weight: float, share: float) -> None:
    state_weight(broker, "x", weight)
    heavy, light = job_of(broker, "x", chunks=80), job_of(broker, "y", chunks=400)
    workers = Workers(broker, work_of={heavy: 1000, light: 100})
    while workers.had.total() < 60_000:
        workers.step()
    assert workers.share([heavy]) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("part", [0.2, 0.7])
def test_the_interactive_lane_has_its_part(broker: Broker, settings: Settings, part: float) -> None:
    workers = Workers(Broker.connect(settings.replace(interactive_share=part)))
    urgent, _ = job_of(broker, "x", "interactive", chunks=80), job_of(broker, "x", chunks=100)
    workers.run(100)
    assert workers.share([urgent]) == pytest.approx(part, abs=0.05)
    workers.broker.close()


@pytest.mark.parametrize("lane", ["interactive", "normal"])
def test_lanes_and_tenants_have_their_parts_of_what_was_work_not_of_what_looked_so(broker: Broker, lane: str) -> None:
    """Such as long ones that are truncated, each in a job of its own."""
    small = [job_of(broker, "x", lane, chunks=1) for _ in range(200)]
    job_of(broker, "y", chunks=100)
    workers = Workers(broker, count=1, work_of=dict.fromkeys(small, LARGE // 40))
    workers.run(150)
    assert workers.share(small) == pytest.approx(0.5, abs=0.1)


def test_who_leaves_and_comes_back_for_each_chunk_has_no_more_than_its_share(broker: Broker) -> None:
    state_weight(broker, "x", 3)
    workers = Workers(broker)
    job_of(broker, "x", chunks=110)
    again, added = broker.jobs.create(spec(tenant="y"))[0], 0
    for _ in range(100):
        if added == workers.done[again]:  # its producer adds a chunk when the last one is done
            add_chunk(broker, again, added)
            added += 1
        workers.step()
    assert workers.share([again]) <= 0.27


def test_a_tenant_that_was_away_has_saved_nothing_up(broker: Broker) -> None:
    workers = Workers(broker)
    job_of(broker, "x", chunks=120)
    job_of(broker, "y", chunks=3)
    workers.run(60)
    back = job_of(broker, "y", chunks=50)
    workers.had.clear()
    workers.run(40)
    assert workers.share([back]) == pytest.approx(0.5, abs=0.11)  # with what workers held when it came


def test_a_large_job_has_half_of_the_turns_beside_more_small_ones_than_are_done(broker: Broker) -> None:
    workers = Workers(broker)
    large = job_of(broker, chunks=200)
    for _ in range(2 * 400):  # twice the time that half of the turns take
        job_of(broker, chunks=1, size=100)
        workers.step()
        if workers.done[large] == 200:
            return
    pytest.fail(f"{workers.done[large]} chunks are done")


def test_a_new_small_job_has_a_turn_soon_beside_large_ones(broker: Broker) -> None:
    """The draw is by the last digit of a clock, so with a chance of 0.0002, it takes longer."""
    workers = Workers(broker, count=1)
    for _ in range(10):
        job_of(broker, chunks=30)
    workers.run(5)
    small = job_of(broker, chunks=1)
    workers.run(12)
    assert small in {*workers.done, *(held.job_id for held in workers.hands)}


def test_an_interactive_job_waits_for_the_chunks_in_hand_alone(broker: Broker) -> None:
    workers = Workers(broker)
    job_of(broker, "x", chunks=100)
    workers.run(30)
    for _ in range(5):
        urgent = job_of(broker, "y", "interactive", chunks=1)
        workers.run(2 * workers.count + 1)
        assert workers.done[urgent] == 1


def test_the_background_waits_until_nothing_else_does_but_not_for_ever(broker: Broker, raw: Redis) -> None:
    workers = Workers(broker)
    slow, normal = job_of(broker, "x", "background", chunks=60), job_of(broker, "y", chunks=100)
    pause = keys.turns(f"pause:{QUEUE}")
    workers.run(50)
    assert workers.done[slow] == 1
    assert 0 < raw.pttl(pause) <= 60_000
    raw.delete(pause)  # a minute later
    workers.run(30)
    assert workers.done[slow] == 2
    workers.run(80)
    assert (workers.done[normal], workers.done[slow]) == (100, 60)


@pytest.mark.parametrize("wrong", [Claimant("o", OTHER, "fp32"), Claimant("o", MINE, "fp16")])
def test_a_worker_that_can_not_encode_a_job_costs_it_nothing(broker: Broker, raw: Redis, wrong: Claimant) -> None:
    job_id = new_job(broker, 3)
    assert take(broker, "first") is not None
    before = {key: raw.dump(key) for key in keys_of(raw, job_id)}
    assert broker.jobs.next(QUEUE, "wrong", wrong) == Given([], later=True, unusable=[])
    assert {key: raw.dump(key) for key in keys_of(raw, job_id)} == before
    found = some(take(broker, "second"))
    assert (found.job_id, found.chunk) == (job_id, 1)


def test_of_the_jobs_that_nobody_began_a_worker_takes_none_that_it_is_not_to_begin(broker: Broker) -> None:
    mine = new_job(broker, 2)
    assert take(broker) is not None
    new_job(broker, 1)
    known = replace(RIGHT, takes_new=False)
    given = [broker.jobs.next(QUEUE, f"known{number}", known) for number in range(2)]
    assert [claim.job_id for each in given for claim in each.claims] == [mine]


#: What `next` reads of a job, and gives with a small one.
FIELDS = [
    *("state", "ttl_ms", "hardware", "model", "precision", "options", "created_ms", "progressed_ms", "lane", "weight"),
    *("work", "next", "added", "chunks_done", "results_high_water", "done", "failed", "records", "claims", "lapsed"),
]
#: Fields that a job may lack, and those that say where it takes turns: edited ones take it elsewhere.
PERHAPS, WHERE = ("lane", "weight", "work", "results_high_water"), ("hardware", "model", "precision")


def damage(raw: Redis, job_id: str, kind: str) -> str:
    """Delete or edit a field of a job, or make one of its keys a list; returns the key."""
    how, _, name = kind.partition(" ")
    key = keys.job(job_id)
    if how == "delete":
        raw.hdel(key, name)
    elif how == "edit":
        raw.hset(key, name, "damaged")
    else:
        key = keys.chunk_input(job_id, 0) if name == "in" else getattr(keys, name)(job_id)
        raw.delete(key)
        raw.rpush(key, "another program's")
    return key


@pytest.mark.parametrize(
    "kind",
    [
        *(f"delete {field}" for field in FIELDS if field not in PERHAPS),
        *(f"edit {field}" for field in FIELDS if field not in WHERE),
        *(f"retype {key}" for key in ("owners", "attempts", "ready", "counted", "events", "drained", "in", "suspects")),
    ],
)
def test_a_damaged_job_ends_and_the_next_one_is_given(broker: Broker, raw: Redis, kind: str) -> None:
    bad, good = two_tenants(broker, raw)
    key = damage(raw, bad, kind)
    given = broker.jobs.next(QUEUE, "next", RIGHT)
    assert [claim.job_id for claim in given.claims] == [good]
    ((job_id, why),) = given.unusable
    assert job_id == bad
    assert why.startswith(f"damaged: {key} "), why
    assert raw.hmget(keys.job(bad), "state", "stopped_by", "trouble") == [b"failed", b"damage", why.encode()]
    assert score(raw, keys.UPKEEP, bad) <= broker.connection.now_ms()
    assert not is_listed(raw, bad)


@pytest.mark.parametrize("field", ["0", "0:deaths"])
def test_what_is_damaged_of_a_chunk_ends_its_job_alone(broker: Broker, raw: Redis, field: str) -> None:
    bad, good = two_tenants(broker, raw)
    raw.hset(keys.attempts(bad), field, "damaged")
    raw.zadd(keys.ready(bad), {"0": 1})  # as one that was given back
    given = broker.jobs.next(QUEUE, "next", RIGHT)
    assert [claim.job_id for claim in given.claims] == [good]
    assert broker.jobs.status(bad).stopped_by == "damage"


def test_a_job_whose_hash_is_none_takes_no_turns(broker: Broker, raw: Redis) -> None:
    bad, good = two_tenants(broker, raw)
    damage(raw, bad, "retype job")
    given = broker.jobs.next(QUEUE, "next", RIGHT)
    assert [claim.job_id for claim in given.claims] == [good]
    assert [job_id for job_id, _ in given.unusable] == [bad]
    assert not is_listed(raw, bad)


@pytest.mark.parametrize("field", WHERE)
def test_a_job_takes_turns_where_its_fields_say(broker: Broker, raw: Redis, field: str) -> None:
    moved, here = two_tenants(broker, raw)
    raw.hset(keys.job(moved), field, "fp16")
    given = broker.jobs.next(QUEUE, "next", RIGHT)
    assert ([claim.job_id for claim in given.claims], given.unusable) == ([here], [])
    queue = keys.queue(*("fp16" if name == field else "dummy" for name in ("hardware", "model")))
    found = broker.jobs.next(queue, "there", replace(RIGHT, precision="fp16" if field == "precision" else "fp32"))
    assert [claim.job_id for claim in found.claims] == [moved]


@pytest.mark.parametrize("weight", [None, "damaged"], ids=["no hash", "no number"])
def test_what_is_damaged_of_a_tenant_ends_none_of_its_jobs(broker: Broker, raw: Redis, weight: str | None) -> None:
    job_id = new_job(broker, 1, tenant="x")
    if weight is None:
        raw.set(keys.quota("x"), "another program's")
    else:
        raw.hset(keys.quota("x"), "weight", weight)
    found = some(take(broker))
    assert found.job_id == job_id


def two_tenants(broker: Broker, raw: Redis) -> tuple[str, str]:
    """A job whose turn is next, and another tenant's."""
    first, second = new_job(broker, 3, tenant="x"), new_job(broker, 1, tenant="y")
    raw.zincrby(keys.turns(f"flows:normal:{QUEUE}:fp32/1:*"), 10**9, "y")
    return first, second


def is_listed(raw: Redis, job_id: str) -> bool:
    return any(raw.zscore(key, job_id) is not None for key in raw.scan_iter(keys.turns("left:*")))
