"""Owners that die: which chunks that makes suspect, and which row a careful death names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from redis import Redis

from embedctl.common.machine import machine_id, process_id, runs
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl_config import keys
from tests.support.store import (
    QUEUE,
    assert_from_now,
    claim,
    complete,
    end_pause,
    lapse,
    new_job,
    reaped,
    row,
    score,
    some,
)
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def bystander(broker: Broker) -> None:
    """A worker that lives on, so that there is a use in reaping."""
    broker.workers.beat(row("bystander"))


def die(
    broker: Broker, job_id: str, chunk: int, raw: Redis, *, at_row: int | None = None, instance: str = "w"
) -> list[int]:
    """Claim a chunk, perhaps come to a row, die witnessed, and be judged. Then the chunk's pause is over."""
    broker.workers.beat(row(instance))
    assert claim(broker, job_id, chunk, f"t-{instance}", instance=instance) is not None
    if at_row is not None:
        assert broker.jobs.renew(job_id, chunk, f"t-{instance}", row=at_row) == "ok"
    broker.workers.report_death(instance, "killed")
    lapse(raw, job_id, chunk)
    again = reaped(broker, job_id)
    end_pause(broker, raw, job_id, chunk)
    return again


def given_up(broker: Broker, job_id: str, chunk: int, token: str) -> frozenset[int] | None:
    """The rows that the next owner of a chunk is not to encode."""
    found = some(claim(broker, job_id, chunk, token))
    return found.given_up


def test_a_lapse_of_a_live_owner_makes_nobody_suspect(broker: Broker, raw: Redis) -> None:
    broker.workers.beat(row())
    job_id = new_job(broker)
    for attempt in range(1, 11):
        found = some(claim(broker, job_id, 0, f"t{attempt}"))
        assert (found.attempt, found.given_up) == (attempt, None)
        lapse(raw, job_id, 0)
        assert reaped(broker, job_id) == [0]
    status = broker.jobs.status(job_id)
    assert (status.lapsed, status.deaths) == (10, 0)
    assert broker.jobs.suspects(job_id) == []


def test_the_death_of_an_owner_makes_its_chunk_suspect(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    assert die(broker, job_id, 0, raw) == [0]
    assert given_up(broker, job_id, 0, "next") == frozenset()
    assert given_up(broker, job_id, 1, "other") is None
    (suspect,) = broker.jobs.suspects(job_id)
    assert (suspect.chunk, suspect.given_up, suspect.stuck) == (0, (), False)
    assert [(death.worker, death.row) for death in suspect.deaths] == [("w", None)]
    assert broker.jobs.status(job_id).deaths == 1


def second_owner(broker: Broker, raw: Redis, *rows: int) -> str:
    """A job whose chunk 0 had an owner that died, and has "second" now, which came to these rows."""
    job_id = new_job(broker, 1)
    die(broker, job_id, 0, raw)
    broker.workers.beat(row("second"))
    claim(broker, job_id, 0, "t2", instance="second")
    for at in rows:
        broker.jobs.renew(job_id, 0, "t2", row=at)
    broker.jobs.renew(job_id, 0, "t2")  # the heartbeat's, which names none
    return job_id


@pytest.mark.parametrize(("rows", "named"), [((0, 1), {1}), ((0, 1, -1), set())], ids=["at a row", "past it"])
def test_a_careful_death_names_a_row(broker: Broker, raw: Redis, rows: tuple[int, ...], named: set[int]) -> None:
    job_id = second_owner(broker, raw, *rows)
    broker.workers.report_death("second", "killed")
    lapse(raw, job_id, 0)
    reaped(broker, job_id)
    end_pause(broker, raw, job_id, 0)
    assert given_up(broker, job_id, 0, "third") == frozenset(named)


def test_a_careful_owner_that_is_only_silent_is_given_time(broker: Broker, raw: Redis) -> None:
    job_id = second_owner(broker, raw, 1)
    for members in (keys.WORKERS, keys.queue_workers(QUEUE)):
        raw.zadd(members, {"second": broker.connection.now_ms() - 1000})
    now = broker.connection.now_ms()
    lapse(raw, job_id, 0, at_ms=now - 2.5 * broker.settings.lease_s * 1000)
    assert reaped(broker, job_id) == []
    assert claim(broker, job_id, 0, "t3") is None
    assert broker.jobs.renew(job_id, 0, "t2") == "ok"  # it comes back
    lapse(raw, job_id, 0, at_ms=now - 3 * broker.settings.lease_s * 1000 - 1000)
    assert reaped(broker, job_id) == [0]
    end_pause(broker, raw, job_id, 0)
    assert given_up(broker, job_id, 0, "t3") == frozenset({1})


@pytest.mark.parametrize("how", ["lives", "released it", "left as it was told"])
def test_a_careful_owner_that_did_not_die_is_never_blamed(broker: Broker, raw: Redis, how: str) -> None:
    job_id = second_owner(broker, raw, 1)
    if how == "released it":
        assert broker.jobs.release(job_id, 0, "t2", delay_s=0)
    else:
        if how != "lives":
            broker.workers.leave(row("second"))  # and Redis did not take the chunk back
        lapse(raw, job_id, 0)
        assert reaped(broker, job_id) == [0]
    end_pause(broker, raw, job_id, 0)
    assert given_up(broker, job_id, 0, "t3") == frozenset()
    assert broker.jobs.status(job_id).deaths == 1


def test_careful_deaths_without_a_row_make_a_chunk_stuck_and_are_spaced_out(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1)
    for number, wait_s in enumerate((2, 2, 2, 60, 120)):
        broker.workers.beat(row(f"w{number}"))
        assert claim(broker, job_id, 0, f"t{number}", instance=f"w{number}") is not None
        broker.workers.report_death(f"w{number}", "killed")
        lapse(raw, job_id, 0)
        began = broker.connection.now_ms()
        assert reaped(broker, job_id) == [0]
        assert broker.jobs.suspects(job_id)[0].stuck is (wait_s > 2)
        assert_from_now(broker, score(raw, keys.suspects(job_id), 0), after_s=wait_s, since_ms=began)
        assert claim(broker, job_id, 0, "early") is None
        end_pause(broker, raw, job_id, 0)
    assert given_up(broker, job_id, 0, "last") == frozenset()
    assert complete(broker, job_id, 0, "last") == "ok"
    assert broker.jobs.suspects(job_id) == []


def test_the_history_of_a_chunk_is_bounded(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    for number in range(13):
        die(broker, job_id, 0, raw, at_row=number if number else None, instance=f"w{number}")
    (suspect,) = broker.jobs.suspects(job_id)
    assert [death.worker for death in suspect.deaths] == [f"w{number}" for number in range(3, 13)]
    assert suspect.given_up == tuple(range(1, 13))


def test_a_neighbour_witnesses_a_death(broker: Broker, raw: Redis) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    there = row("neighbour", machine=machine_id(), process=process_id(process.pid))
    broker.workers.beat(there)
    broker.workers.beat(row("far", machine="another machine", process="1.1"))
    broker.workers.beat(row("me", machine=machine_id(), process=process_id(os.getpid())))
    assert broker.workers.witness() == set()
    process.kill()
    eventually(lambda: not runs(there.process))  # a zombie until it is waited for, and dead all the same
    assert broker.workers.witness() == {"neighbour"}
    process.wait()
    assert {worker.instance for worker in broker.workers.alive()} == {"bystander", "far", "me"}
    assert broker.workers.count(QUEUE) == 3
    assert [(each.worker.instance, each.how) for each in broker.workers.gone()] == [
        ("neighbour", "its process ended without a word")
    ]
    assert broker.workers.witness() == set()
    assert 0 < raw.ttl(keys.died("neighbour")) <= keys.GONE_TTL_S


def test_a_witnessed_death_ends_its_leases_at_once(broker: Broker, raw: Redis) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    there = row("neighbour", machine=machine_id(), process=process_id(process.pid))
    process.wait()
    job_id = new_job(broker)
    claim(broker, job_id, 0, "dead", instance="neighbour")
    claim(broker, job_id, 1, "alive", instance="bystander")
    broker.workers.beat(there)
    broker.upkeep.agenda.take_turn = lambda held_s: "turn"  # type: ignore[method-assign]  # two leases of this test are a minute
    Reaper(broker).round()
    end_pause(broker, raw, job_id, 0)
    assert given_up(broker, job_id, 0, "next") == frozenset()
    assert claim(broker, job_id, 1, "next") is None
