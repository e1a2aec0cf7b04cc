"""What may kill a worker goes to workers in quarantine, while there are any, and costs the others nothing."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import end_leases
from embedctl.store import Claim, Claimant
from embedctl_config import keys, wire
from tests.support.shares import LARGE, job_of
from tests.support.store import (
    MINE,
    QUEUE,
    complete,
    encoded,
    end_pause,
    lapse,
    new_job,
    reaped,
    row,
    score,
    some,
    take,
)

APART = row("q", quarantine=True)


def take_apart(broker: Broker, token: str) -> Claim | None:
    given = broker.jobs.next(QUEUE, token, Claimant(APART.instance, MINE, "fp32", quarantine=True))
    return given.claims[0] if given.claims else None


def killer(broker: Broker, raw: Redis, chunks: int = 1) -> str:
    job_id = new_job(broker, chunks)
    broker.workers.beat(row("victim"))
    assert take(broker, "victim", instance="victim") is not None
    broker.workers.report_death("victim", "killed")
    lapse(raw, job_id, 0)
    reaped(broker, job_id)
    return job_id


def facts(claim: Claim | None) -> tuple[str, int, object] | None:
    return (claim.job_id, claim.chunk, claim.given_up) if claim else None


def test_a_suspect_waits_for_a_worker_in_quarantine_that_is_being_started(broker: Broker, raw: Redis) -> None:
    broker.workers.expect_quarantine([QUEUE], "q/", 60)
    job_id = killer(broker, raw)
    end_pause(broker, raw, job_id, 0)
    assert take(broker) is None


@pytest.mark.parametrize("how", ["never was", "left", "died", "is silent"])
def test_a_suspect_is_given_to_any_worker_where_none_is_in_quarantine(broker: Broker, raw: Redis, how: str) -> None:
    if how != "never was":
        broker.workers.beat(APART)
    job_id = killer(broker, raw)
    if how == "left":
        broker.workers.leave(APART)
    elif how == "died":
        broker.workers.report_death(APART.instance, "killed")
        until = score(raw, keys.queue_quarantine(QUEUE), APART.instance)
        assert broker.connection.now_ms() < until <= broker.connection.now_ms() + 5_000  # the next one may come
        raw.zadd(keys.queue_quarantine(QUEUE), {APART.instance: 1})
    elif how == "is silent":
        raw.zadd(keys.queue_quarantine(QUEUE), {APART.instance: broker.connection.now_ms() - 1})
    end_pause(broker, raw, job_id, 0)
    assert facts(take(broker)) == (job_id, 0, frozenset())


def test_a_death_in_which_no_row_was_named_leaves_the_rest_of_its_job_to_all(broker: Broker, raw: Redis) -> None:
    """Somebody may have killed the worker."""
    broker.workers.beat(APART)
    job_id = new_job(broker, 3)
    die(broker, raw, job_id)
    assert all_given(broker, quarantine=False) == {(job_id, 1), (job_id, 2)}
    assert all_given(broker, quarantine=True) == {(job_id, 0)}


def test_a_worker_in_quarantine_takes_nothing_else_and_is_no_worker_to_wait_for(broker: Broker, raw: Redis) -> None:
    broker.workers.beat(APART)
    job_id = new_job(broker, 1)
    assert take_apart(broker, "1") is None
    assert (broker.workers.count(QUEUE), broker.workers.offers(), raw.llen(QUEUE)) == (0, {}, 0)
    assert [worker.instance for worker in broker.workers.alive()] == ["q"]
    assert facts(take(broker, "2")) == (job_id, 0, None)


def all_given(broker: Broker, *, quarantine: bool) -> set[tuple[str, int]]:
    """The chunks that a worker is given that asks until there is none."""
    asked = partial(take_apart if quarantine else take, broker)
    claims = iter(lambda: asked(secrets.token_hex(4)), None)
    return {(each.job_id, each.chunk) for each in claims if each is not None}


def die(broker: Broker, raw: Redis, *jobs: str) -> None:
    """A worker takes a chunk of each of these jobs and dies, which is witnessed; and the suspects have waited."""
    broker.workers.beat(row("victim"))
    held = [some(take(broker, secrets.token_hex(4), instance="victim")) for _ in jobs]
    assert {each.job_id for each in held} == set(jobs)
    broker.workers.report_death("victim", "killed")
    end_leases(broker, {"victim"}, jobs)
    for each in held:
        end_pause(broker, raw, each.job_id, each.chunk)


def distrust(broker: Broker, raw: Redis, job_id: str) -> None:
    """A worker dies at the first chunk, then the one in quarantine at a row of it, as another one did a moment ago."""
    raw.hset(keys.job(job_id), "killed_ms", broker.connection.now_ms())
    die(broker, raw, job_id)
    claim = some(take_apart(broker, "first"))
    assert broker.jobs.renew(job_id, claim.chunk, claim.token, row=1) == "ok"
    broker.workers.report_death("q", "killed by SIGSEGV")
    end_leases(broker, {"q"}, [job_id])
    broker.workers.beat(APART)  # the next one
    end_pause(broker, raw, job_id, claim.chunk)


@pytest.mark.parametrize("left", ["by a report", "silently"])
def test_a_distrusted_job_goes_to_quarantine_while_there_is_one(broker: Broker, raw: Redis, left: str) -> None:
    job_id = new_job(broker, 5)
    broker.workers.beat(APART)
    distrust(broker, raw, job_id)
    assert take(broker, "x") is None
    found = [take_apart(broker, token) for token in ("1", "2")]
    assert [(each.chunk, each.given_up) for each in found if each] == [(0, frozenset({1})), (1, frozenset())]
    if left == "by a report":
        broker.workers.leave(APART)
    else:
        raw.zadd(keys.queue_quarantine(QUEUE), {"q": 1})
    assert all_given(broker, quarantine=False) == {(job_id, 2), (job_id, 3), (job_id, 4)}


def test_others_take_the_rest_also_if_they_were_given_the_last_suspect(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3)
    broker.workers.beat(APART)
    distrust(broker, raw, job_id)
    broker.workers.leave(APART)
    assert all_given(broker, quarantine=False) == {(job_id, 0), (job_id, 1), (job_id, 2)}


def test_a_job_is_trusted_again_a_minute_after_the_last_death(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3)
    broker.workers.beat(APART)
    began = broker.connection.now_ms()
    distrust(broker, raw, job_id)
    until = float(raw.hget(keys.job(job_id), "distrusted_ms") or 0)
    assert began + 60_000 <= until <= broker.connection.now_ms() + 60_000
    raw.hset(keys.job(job_id), "progressed_ms", 1)  # the reaper looks in time, however long nothing happened
    reaped(broker, job_id)
    assert score(raw, keys.UPKEEP, job_id) <= until + 1
    raw.hset(keys.job(job_id), "distrusted_ms", 1)
    assert facts(take_apart(broker, "1")) == (job_id, 0, frozenset({1}))
    assert all_given(broker, quarantine=True) == set()
    assert all_given(broker, quarantine=False) == {(job_id, 1), (job_id, 2)}


def two_watched(broker: Broker, raw: Redis) -> list[str]:
    """Two jobs that were both in hand when a worker died, and when the next one died."""
    jobs = [new_job(broker, 12, tenant=tenant) for tenant in ("a", "b")]
    broker.workers.beat(APART)
    for deaths in (1, 2):
        assert not any(raw.hexists(keys.job(job_id), "watched_ms") for job_id in jobs)
        die(broker, raw, *jobs)
        assert [broker.jobs.status(job_id).deaths for job_id in jobs] == [deaths, deaths]
    assert all_given(broker, quarantine=True) == {(job_id, chunk) for job_id in jobs for chunk in (0, 1)}
    return jobs


@pytest.mark.parametrize("is_alone", [True, False])
def test_of_jobs_that_were_in_hand_at_a_death_the_next_one_tells_which_is_to_blame(
    broker: Broker, raw: Redis, is_alone: bool
) -> None:
    jobs = two_watched(broker, raw)
    given = {name: [some(take(broker, f"{name}{at}", instance=name)) for at in range(3)] for name in ("v", "w")}
    of = {name: {each.job_id for each in claims} for name, claims in given.items()}
    assert list(map(len, of.values())) == [1, 1]
    assert set().union(*of.values()) == set(jobs)
    # Others are taken as usual. One of them may have such a text too, so a death says nothing then of those watched.
    beside = new_job(broker, 12, tenant="c")
    for name in ("v",) if is_alone else ("v", "w"):
        while some(take(broker, secrets.token_hex(4), instance=name)).job_id != beside:
            pass
    broker.workers.beat(row("w"))
    broker.workers.report_death("w", "killed")
    end_leases(broker, {"w"}, [*jobs, beside])
    distrusted = {job_id for job_id in (*jobs, beside) if raw.hexists(keys.job(job_id), "distrusted_ms")}
    assert distrusted == (of["w"] if is_alone else set())


def test_a_watched_job_that_has_no_worker_is_given_another_ones(broker: Broker, raw: Redis) -> None:
    jobs = two_watched(broker, raw)
    first = some(take(broker, "1"))
    assert some(take(broker, "2")).job_id == first.job_id
    (other,) = {*jobs} - {first.job_id}
    key = keys.watched("w")
    assert raw.get(key) is not None
    raw.set(key, f"{first.job_id} 1 {other}")  # since long ago
    assert some(take(broker, "3", instance="v")).job_id == other
    assert some(take(broker, "4")).job_id == first.job_id  # the other one has a worker now
    assert complete(broker, other, 2, "3") == "ok"
    assert take(broker, "5") is None  # what it has is to be done first
    for chunk, token in ((2, "1"), (3, "2"), (4, "4")):
        assert complete(broker, first.job_id, chunk, token) == "ok"
    assert some(take(broker, "6")).job_id == other


def test_a_job_is_trusted_again_once_so_many_chunks_came_through_each_time_twice_as_many(
    broker: Broker, raw: Redis
) -> None:
    job_id = new_job(broker, 30)
    broker.workers.beat(APART)
    distrust(broker, raw, job_id)
    for chunks in (5, 8):  # the first of five has a row that killed a worker
        for _ in range(chunks):
            assert take(broker, "x") is None
            token = secrets.token_hex(4)
            assert complete(broker, job_id, some(take_apart(broker, token)).chunk, token) == "ok"
        assert take_apart(broker, "y") is None
        die(broker, raw, job_id)  # it is trusted, and watched: one death is enough


def in_hand(broker: Broker, name: str) -> set[str]:
    """The jobs of two chunks that a worker takes."""
    broker.workers.beat(row(name))
    return {some(take(broker, secrets.token_hex(4), instance=name)).job_id for _ in range(2)}


def killed(broker: Broker, name: str, jobs: list[str]) -> None:
    broker.workers.report_death(name, "killed")
    end_leases(broker, {name}, jobs)


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_tenant_whose_jobs_kill_one_after_the_other_is_distrusted_for_the_sake_of_others(
    broker: Broker, raw: Redis, others_wait: bool
) -> None:
    bad, good = [new_job(broker, 1, tenant="a") for _ in range(20)], new_job(broker, 12, tenant="b")
    broker.workers.beat(APART)
    faults = keys.faults(f"{QUEUE}:a")
    for name in ("1", "2"):  # each time another job of the first tenant, and the same one of the other
        assert not raw.hexists(faults, "watched_ms")
        assert len(in_hand(broker, name) - {good}) == 1
        killed(broker, name, [*bad, good])
    had = {name: in_hand(broker, name) for name in ("v", "w")}
    assert sorted(each == {good} for each in had.values()) == [False, True]  # watched tenants are in no worker together
    if not others_wait:
        broker.jobs.cancel(good)
    killed(broker, next(name for name, each in had.items() if each != {good}), [*bad, good])
    assert raw.hexists(faults, "distrusted_ms") == others_wait
    assert not raw.hexists(keys.job(good), "distrusted_ms")
    assert all_given(broker, quarantine=False) <= {(good, chunk) for chunk in range(12)} or not others_wait


def test_a_distrusted_tenant_is_trusted_again_once_so_many_chunks_came_through(broker: Broker, raw: Redis) -> None:
    jobs = [new_job(broker, 1, tenant="a") for _ in range(6)]
    broker.workers.beat(APART)
    faults = keys.faults(f"{QUEUE}:a")
    until_ms = broker.connection.now_ms() + 60_000
    raw.hset(faults, mapping={"distrusted_ms": until_ms, "trials": 4, "trials_left": 4})
    for left in (3, 2, 1, 0):
        assert take(broker, "x") is None
        claim = some(take_apart(broker, token := secrets.token_hex(4)))
        assert complete(broker, claim.job_id, claim.chunk, token) == "ok"
        assert raw.hget(faults, "trials_left") == str(left).encode()
    assert take_apart(broker, "y") is None
    assert len(all_given(broker, quarantine=False)) == len(jobs) - 4


def test_others_do_not_wait_until_all_jobs_of_a_distrusted_tenant_are_listed_apart(broker: Broker, raw: Redis) -> None:
    for _ in range(130):
        new_job(broker, 1, tenant="a")
    good = new_job(broker, 12, tenant="b")
    broker.workers.beat(APART)
    raw.hset(keys.faults(f"{QUEUE}:a"), "distrusted_ms", broker.connection.now_ms() + 60_000)
    for number in range(12):
        assert some(take(broker, str(number))).job_id == good
    assert take_apart(broker, "x") is not None


def test_a_second_row_named_within_a_minute_distrusts_its_job(broker: Broker, raw: Redis) -> None:
    bad, good = new_job(broker, 3, tenant="a"), new_job(broker, 3, tenant="b")
    broker.workers.beat(APART)
    raw.hset(keys.job(bad), "killed_ms", broker.connection.now_ms() - 50_000)
    die(broker, raw, bad, good)
    claim = next(each for each in (take_apart(broker, "1"), take_apart(broker, "2")) if each and each.job_id == bad)
    assert broker.jobs.renew(bad, claim.chunk, claim.token, row=1) == "ok"
    lapse(raw, bad, claim.chunk)
    broker.workers.report_death("q", "killed by SIGSEGV")
    reaped(broker, bad)
    broker.workers.beat(APART)  # the next one
    assert {job_id for job_id, _ in all_given(broker, quarantine=False)} == {good}
    assert {chunk for job_id, chunk in all_given(broker, quarantine=True) if job_id == bad} == {1, 2}
    (suspect,) = broker.jobs.suspects(bad)
    assert (suspect.chunk, suspect.given_up, len(suspect.deaths)) == (0, (1,), 2)
    assert broker.jobs.status(bad).deaths == 2


def test_small_chunks_that_are_gathered_leave_suspects_where_they_are_listed(broker: Broker, raw: Redis) -> None:
    bad, good = new_job(broker, 1, tenant="a"), new_job(broker, 1, tenant="b")
    die(broker, raw, bad, good)
    other = new_job(broker, 2, tenant="c")
    by = Claimant("bystander", MINE, "fp32")
    gathered = broker.jobs.gather(broker.jobs.status(other), "g", by, 10**6).claims
    assert {each.job_id for each in gathered} <= {other}
    assert {job_id for job_id, _ in all_given(broker, quarantine=False)} >= {bad, good}


def test_a_bell_rings_for_suspects_only_while_others_may_take_them(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1)
    for each in (APART, row("w")):
        broker.workers.beat(each)
    die(broker, raw, job_id)
    assert take(broker, "x") is None
    for living, bells in ((True, 0), (False, 1)):
        if not living:
            broker.workers.leave(APART)
        raw.unlink(QUEUE)
        broker.jobs.ring("fp32", {QUEUE: MINE})
        assert raw.llen(QUEUE) == bells
        raw.unlink(QUEUE)
        reaped(broker, job_id)
        assert raw.llen(QUEUE) == bells


def test_a_lost_answer_is_given_again_with_the_same_care(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2)
    broker.workers.beat(APART)
    distrust(broker, raw, job_id)
    assert facts(take_apart(broker, "suspect")) == (job_id, 0, frozenset({1}))
    for _ in range(2):
        assert facts(take_apart(broker, "same")) == (job_id, 1, frozenset())


def test_a_worker_that_died_before_it_encoded_any_of_a_job_pins_it_no_longer(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2)
    broker.workers.beat(APART)
    die(broker, raw, job_id)
    assert broker.jobs.status(job_id).model_fingerprint is None
    assert take_apart(broker, "t") is not None
    assert broker.jobs.status(job_id).model_fingerprint == MINE


@pytest.mark.parametrize("lane", ["normal", "background"])
def test_tenants_take_turns_in_quarantine_however_much_they_have_elsewhere(
    broker: Broker, raw: Redis, lane: str
) -> None:
    bad = [new_job(broker, 1, tenant="a") for _ in range(12)]
    broker.workers.beat(APART)
    die(broker, raw, *bad)
    for turn in range(4):
        suspect = new_job(broker, 1, tenant="b", lane=lane)
        die(broker, raw, suspect)
        usual = job_of(broker, "b", chunks=1)
        claim = some(take(broker, f"usual {turn}"))
        value, report = encoded(claim.input)
        report = replace(report, work=LARGE)
        assert broker.jobs.complete(usual, 0, claim.token, value, report, fingerprint=MINE) == "ok"
        given = {some(take_apart(broker, f"{turn} {at}")).job_id for at in range(2)}
        assert suspect in given
        assert len(given & {*bad}) == 1


def test_what_quarantine_takes_is_charged_to_nobody_and_usual_work_moves_nobody_there(
    broker: Broker, raw: Redis
) -> None:
    broker.workers.beat(APART)
    job_id = killer(broker, raw, 3)
    end_pause(broker, raw, job_id, 0)
    apart, usual = (keys.turns(f"flows:normal:{QUEUE}:{kind}fp32/{wire.VERSION}:*") for kind in ("apart:", ""))

    since, had = (score(raw, key, "default") for key in (apart, usual))
    assert some(take(broker, "usual")).chunk == 1
    assert score(raw, apart, "default") == since
    assert (charged := score(raw, usual, "default")) > had
    assert facts(take_apart(broker, "apart")) == (job_id, 0, frozenset())
    assert complete(broker, job_id, 0, "apart") == "ok"
    assert score(raw, usual, "default") == charged


def test_where_none_is_in_quarantine_suspects_take_turns_with_usual_work(broker: Broker, raw: Redis) -> None:
    bad = [new_job(broker, 1, tenant="a") for _ in range(12)]
    die(broker, raw, *bad)
    good = new_job(broker, 12, tenant="b")
    given = [some(take(broker, str(number))).job_id for number in range(12)]
    assert 4 <= given.count(good) <= 8
