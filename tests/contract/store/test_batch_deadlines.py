"""Deadlines of batches: whatever is away, each state ends, and no clock that is set ends one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store.batches import BatchStore, EventStore, Step, StoredBatch
from embedctl.store.stored_files import Once
from embedctl_config import keys


@pytest.fixture
def batches(broker: Broker) -> BatchStore:
    return BatchStore(broker.connection)


def made(batches: BatchStore, facts: Mapping[str, object] | None = None) -> StoredBatch:
    """A batch that a runner has."""
    batch_id = batches.new_id("batch_")
    batches.make(batch_id, {"tenant": "a", **(facts or {})}, Once(batch_id, "digest", again=False))
    taken = batches.take("token", 30.0)
    assert taken is not None
    return taken


def pass_deadline(raw: Redis, batch: StoredBatch) -> None:
    assert raw.zscore(keys.DEADLINES, batch.id) is not None
    raw.zadd(keys.DEADLINES, {batch.id: 0})


@pytest.mark.parametrize(("status", "ends"), [("cancelling", "cancelled"), ("finalizing", "expired")])
def test_a_batch_that_nobody_could_end_is_ended_from_its_facts(
    batches: BatchStore, broker: Broker, raw: Redis, status: str, ends: str
) -> None:
    batch = made(batches, {"total": 3, "completed": 2, "job": "the job"})
    batches.note(batch, "token", Step({"status": status}))
    assert batches.end_late(told=True) == []
    pass_deadline(raw, batch)
    raw.config_set("maxmemory", 1)  # a full Redis is no hindrance
    try:
        assert batches.end_late(told=True) == ["the job"]
    finally:
        raw.config_set("maxmemory", 0)
    found = batches.get(batch.id, "a")
    assert found is not None
    assert (found.status, found.number("completed"), found.number("failed")) == (ends, 0, 3)
    assert found.number(f"{ends}_at") > 0
    assert found.parsed("errors")[0]["code"] == "ended_late"
    event = EventStore(broker.connection).take("token", 30.0)
    assert event is not None
    assert (event.type, event.batch_id) == (f"batch.{ends}", batch.id)
    assert batches.note(batch, "token", Step({"status": "completed"}, after="end")) is None  # it came too late
    assert (raw.zcard(keys.unfinished("a")), raw.zcard(keys.DEADLINES)) == (0, 0)


def test_another_end_after_a_loss_is_another_event(batches: BatchStore, broker: Broker, raw: Redis) -> None:
    batch, events = made(batches), EventStore(broker.connection)
    before: dict[Any, Any] = raw.hgetall(keys.batch(batch.id))
    ids = set()
    for status in ("completed", "completed", "cancelled"):
        raw.delete(keys.batch(batch.id))
        raw.hset(keys.batch(batch.id), mapping=before)  # Redis comes back without its last second
        batches.note(batch, "token", Step({"status": status}, after="end", told=True))
        event = events.take("token", 30.0)
        assert event is not None
        assert event.type == f"batch.{status}"
        ids.add(event.id)
    assert len(ids) == 2


@pytest.mark.parametrize("status", ["validating", "in_progress"])
def test_a_batch_that_runs_for_too_long_is_left_to_a_runner_at_first(
    batches: BatchStore, raw: Redis, status: str
) -> None:
    batch = made(batches)
    batches.note(batch, "token", Step({"status": status}, after="release"))
    pass_deadline(raw, batch)
    assert batches.end_late(told=False) == []
    taken = batches.take("other", 30.0)
    assert taken is not None
    assert (taken.status, taken.facts["ends_as"]) == ("finalizing", "expired")
    pass_deadline(raw, batch)
    batches.end_late(told=False)
    assert batches.status(batch) == "expired"
    assert raw.zcard(keys.UNTOLD) == 0


def test_a_step_of_redis_clock_ends_nothing(batches: BatchStore, raw: Redis) -> None:
    batch = made(batches)
    for hours in (25, -25, 25):  # Redis' clock is ahead of what it was, or behind
        raw.hincrby(keys.CLOCK, "redis", -hours * 3_600_000)
        before = int(raw.hget(keys.CLOCK, "ledger") or 0)
        batches.end_late(told=False)
        assert 0 <= int(raw.hget(keys.CLOCK, "ledger") or 0) - before <= keys.CLOCK_STEP_S * 1000
        assert batches.status(batch) == "validating"


def test_what_is_no_batch_stops_no_other_ones_end(batches: BatchStore, raw: Redis) -> None:
    raw.set(keys.batch("batch_0"), "no hash")
    raw.zadd(keys.DEADLINES, {"batch_0": 0, "batch_1": 0})
    batch = made(batches)
    batches.note(batch, "token", Step({"status": "cancelling"}))
    pass_deadline(raw, batch)
    batches.end_late(told=False)
    assert batches.status(batch) == "cancelled"
    assert raw.zcard(keys.DEADLINES) == 0
