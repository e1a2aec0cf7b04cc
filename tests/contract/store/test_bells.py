"""Bells: which steps ring, how often, and what a bell is worth that is lost, doubled or of no use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Claimant
from embedctl_config import keys
from tests.support.store import (
    MINE,
    OTHER,
    QUEUE,
    add,
    audited,
    complete,
    lapse,
    new_job,
    reaped,
    row,
    take,
    work,
)


def lose_a_lease(broker: Broker, raw: Redis, job_id: str) -> None:
    """As a Redis that restarts without its last writes."""
    raw.delete(keys.leases(job_id), keys.owners(job_id))
    audited(broker, job_id)


def let_lapse(broker: Broker, raw: Redis, job_id: str) -> None:
    lapse(raw, job_id, 0)
    reaped(broker, job_id)


def retry(broker: Broker, raw: Redis, job_id: str) -> None:
    complete(broker, job_id, 0, failed=1)
    raw.delete(QUEUE)
    broker.jobs.retry(job_id, 0, 1, "p")


#: What makes a chunk ready of a job whose first chunk is leased, and the number of its chunks.
STEPS: dict[str, tuple[int, Callable[[Broker, Redis, str], object]]] = {
    "release": (1, lambda broker, raw, job_id: broker.jobs.release(job_id, 0, "t", delay_s=0)),
    "reap": (1, let_lapse),
    "audit": (1, lose_a_lease),
    "retry": (1, retry),
    "complete": (2, lambda broker, raw, job_id: complete(broker, job_id, 0)),
    "next": (3, lambda broker, raw, job_id: take(broker, "u")),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_after_which_chunks_are_ready_rings(broker: Broker, raw: Redis, step: str) -> None:
    broker.workers.beat(row())
    chunks, take_step = STEPS[step]
    job_id = new_job(broker, chunks)
    assert take(broker) is not None
    raw.delete(QUEUE)
    take_step(broker, raw, job_id)
    assert raw.llen(QUEUE) > 0


def test_a_bell_waits_for_each_chunk_but_no_more_than_workers_hear_soon(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3, seal=False)
    assert raw.llen(QUEUE) == 0  # nobody would hear it
    for workers in (1, 2):
        broker.workers.beat(row(f"w{workers}"))
        for chunk in range(3 * workers, 3 * workers + 3):
            add(broker, job_id, chunk)
        assert raw.llen(QUEUE) == (3, 6)[workers - 1]
    for chunk in range(9, 20):
        add(broker, job_id, chunk)
    assert raw.llen(QUEUE) == 8


def test_who_takes_the_last_chunk_rings_for_nobody(broker: Broker, raw: Redis) -> None:
    new_job(broker, 1)
    broker.workers.beat(row())
    assert take(broker) is not None
    broker.jobs.ring("fp32", {QUEUE: MINE})
    assert raw.llen(QUEUE) == 0


def test_a_lost_bell_is_rung_again_for_a_worker_that_can_take_what_is_ready(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2)
    broker.workers.beat(row())
    broker.jobs.ring("fp16", {QUEUE: MINE})
    broker.jobs.ring("fp32", {f"{QUEUE}-too": MINE})
    assert raw.llen(QUEUE) == 0
    for _ in range(2):
        broker.jobs.ring("fp32", {QUEUE: MINE})
        assert raw.llen(QUEUE) == 1
    work(broker, job_id, 0)  # so it is pinned
    raw.delete(QUEUE)
    broker.jobs.ring("fp32", {QUEUE: OTHER})
    assert raw.llen(QUEUE) == 0
    broker.jobs.ring("fp32", {QUEUE: MINE})
    assert raw.llen(QUEUE) == 1


def test_a_worker_that_hears_the_bell_of_another_ones_chunk_rings_for_it(broker: Broker, raw: Redis) -> None:
    work(broker, new_job(broker, 2), 0)
    broker.workers.beat(row())
    given = broker.jobs.next(QUEUE, "u", Claimant("other", OTHER, "fp32"))
    assert (given.claims, given.later, raw.llen(QUEUE)) == ([], True, 1)
    assert take(broker, "v") is not None


def test_the_list_of_another_program_under_a_queues_name_holds_up_no_job(broker: Broker, raw: Redis) -> None:
    raw.set(QUEUE, "somebody else's")
    broker.workers.beat(row())
    job_id = new_job(broker, 2)
    broker.jobs.ring("fp32", {QUEUE: MINE})
    work(broker, job_id, 0, 1)
    assert broker.jobs.status(job_id).state.ended
    assert raw.get(QUEUE) == b"somebody else's"
