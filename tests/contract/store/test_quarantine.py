"""What may kill a worker goes to workers in quarantine, while there are any, and costs the others nothing."""

from __future__ import annotations

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Claim, Claimant
from embedctl_config import keys
from tests.support.store import MINE, QUEUE, end_pause, lapse, new_job, reaped, row, take

APART = row("q", quarantine=True)


def take_apart(broker: Broker, token: str) -> Claim | None:
    """What a worker in quarantine is given."""
    given = broker.jobs.next(QUEUE, token, Claimant(APART.instance, MINE, "fp32", quarantine=True))
    return given.claims[0] if given.claims else None


def killer(broker: Broker, raw: Redis, chunks: int = 2) -> str:
    """A job over whose first chunk a worker died."""
    job_id = new_job(broker, chunks)
    broker.workers.beat(row("victim"))
    assert take(broker, "victim", instance="victim") is not None
    broker.workers.report_death("victim", "killed")
    lapse(raw, job_id, 0)
    reaped(broker, job_id)
    return job_id


def facts(claim: Claim | None) -> tuple[str, int, object] | None:
    return claim and (claim.job_id, claim.chunk, claim.given_up)


def test_a_suspect_is_given_to_a_worker_in_quarantine_alone(broker: Broker, raw: Redis) -> None:
    broker.workers.beat(APART)
    job_id = killer(broker, raw)
    assert take_apart(broker, "early") is None
    end_pause(broker, raw, job_id, 0)
    assert facts(take(broker, "1")) == (job_id, 1, None)
    assert take(broker, "2") is None
    assert facts(take_apart(broker, "3")) == (job_id, 0, frozenset())
    assert take_apart(broker, "4") is None


def test_a_suspect_waits_for_a_worker_in_quarantine_that_is_being_started(broker: Broker, raw: Redis) -> None:
    broker.workers.expect_quarantine([QUEUE], "q/", 60)
    job_id = killer(broker, raw, 1)
    end_pause(broker, raw, job_id, 0)
    assert take(broker) is None


@pytest.mark.parametrize("how", ["never was", "left", "died", "is silent"])
def test_a_suspect_is_given_to_any_worker_where_none_is_in_quarantine(broker: Broker, raw: Redis, how: str) -> None:
    if how != "never was":
        broker.workers.beat(APART)
    job_id = killer(broker, raw, 1)
    if how == "left":
        broker.workers.leave(APART)
    elif how == "died":
        broker.workers.report_death(APART.instance, "killed")
    elif how == "is silent":
        raw.zadd(keys.queue_quarantine(QUEUE), {APART.instance: broker.connection.now_ms() - 1})
    end_pause(broker, raw, job_id, 0)
    assert facts(take(broker)) == (job_id, 0, frozenset())


@pytest.mark.parametrize("alone", [True, False])
def test_after_a_death_over_one_job_all_of_it_is_in_quarantine_for_a_while(
    broker: Broker, raw: Redis, *, alone: bool
) -> None:
    """Of several jobs that the worker held, each may be harmless."""
    broker.workers.beat(APART)
    job_id = new_job(broker, 4)
    broker.workers.beat(row("victim"))
    take(broker, instance="victim")
    broker.workers.report_death("victim", "killed")
    broker.jobs.end_leases([job_id], {"victim"})
    broker.upkeep.judge_dead([job_id] if alone else [job_id, new_job(broker, 0)])
    if alone:
        other = new_job(broker, 1)
        assert facts(take(broker, "1")) == (other, 0, None)
        assert take(broker, "2") is None
        assert facts(take_apart(broker, "3")) == (job_id, 1, frozenset())
        raw.hset(keys.job(job_id), "distrusted_ms", 1)
        reaped(broker, job_id)
        assert facts(take(broker, "4")) == (job_id, 2, None)
    assert take_apart(broker, "5") is None
    assert facts(take(broker, "6")) == (job_id, 3 if alone else 1, None)


def test_a_worker_in_quarantine_takes_nothing_else_and_is_no_worker_to_wait_for(broker: Broker, raw: Redis) -> None:
    broker.workers.beat(APART)
    job_id = new_job(broker, 1)
    assert take_apart(broker, "1") is None
    assert (broker.workers.count(QUEUE), broker.workers.offers(), raw.llen(QUEUE)) == (0, {}, 0)
    assert [worker.instance for worker in broker.workers.alive()] == ["q"]
    assert facts(take(broker, "2")) == (job_id, 0, None)
