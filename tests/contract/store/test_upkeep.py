"""reap, audit and free: what was lost on the way comes back, and nothing healthy is touched."""

from __future__ import annotations

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import upkeep
from embedctl_config import keys
from tests.support.store import (
    QUEUE,
    assert_consistent,
    audited,
    claim,
    keys_of,
    lapse,
    new_job,
    reaped,
    row,
    take,
    take_all,
    work,
)


@pytest.mark.parametrize("workers", [0, 1])
def test_lapsed_chunks_are_offered_to_live_workers(broker: Broker, raw: Redis, workers: int) -> None:
    job_id = new_job(broker, 3)
    broker.workers.leave(row("w"))  # the owner, which is not taken for dead
    for chunk in range(3):
        claim(broker, job_id, chunk, f"t{chunk}")
    for number in range(workers):
        broker.workers.beat(row(f"w{number}"))
    assert reaped(broker, job_id) == []
    lapse(raw, job_id, 0, 2)
    assert reaped(broker, job_id) == [0, 2]
    assert raw.llen(QUEUE) == 2 * workers
    assert_consistent(broker, raw, job_id)
    again = [take(broker, f"again{number}") for number in range(3)]
    assert [None if each is None else (each.chunk, each.attempt) for each in again] == [(0, 2), (2, 2), None]


def test_an_audit_marks_the_range_of_what_is_lost(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 8)
    work(broker, job_id, 3)
    raw.delete(keys.chunk_input(job_id, 2), keys.chunk_input(job_id, 5))
    assert take_all(broker) == [0, 1, 4, 6, 7]
    raw.delete(keys.chunk_result(job_id, 3))
    assert audited(broker, job_id) == 3
    assert broker.jobs.status(job_id).lost_chunks == (2, 5)
    assert audited(broker, job_id) == 3
    assert broker.jobs.status(job_id).lost_chunks == (2, 5)


def test_a_long_job_is_audited_by_slices(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 3)
    job_id = new_job(broker, 8)
    raw.delete(keys.chunk_input(job_id, 1), keys.chunk_input(job_id, 7))
    take_all(broker)
    assert [audited(broker, job_id) for _ in range(4)] == [1, 0, 1, 1]
    assert broker.jobs.status(job_id).lost_chunks == (1, 7)


def test_freeing_takes_a_slice_at_a_time(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 3)
    job_id = new_job(broker, 7)
    work(broker, job_id, 0, 4, failed=1)
    broker.jobs.cancel(job_id)
    assert [broker.upkeep.free_slice(job_id, 7) for _ in range(3)] == [False, False, True]
    assert not any(":in:" in key or ":out:" in key for key in keys_of(raw, job_id))
    assert broker.jobs.status(job_id).state == "cancelled"
