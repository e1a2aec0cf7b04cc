"""The scripts of a drain: who may drain, what a durable part frees, and what drained chunks mean to all other steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Added, DrainState, Holder, PartFacts
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerFull, JobCancelled
from tests.support.limits import limited
from tests.support.store import QUEUE, add, encoded, keys_of, new_job, payload, row, take_all, work

HIGH_WATER = 10**6
ME, OTHER = Holder("me", "machine", "1.1", "host"), Holder("other", "machine", "2.1", "elsewhere")
PART = "part-000000.parquet"
RESULT, _ = encoded(payload(0))


def take(broker: Broker, job_id: str, holder: Holder = ME, high_water: int = HIGH_WATER) -> DrainState:
    found = broker.drains.take(job_id, holder, high_water=high_water, place="/parts")
    assert isinstance(found, DrainState)
    return found


def facts(first: int, last: int, sha256: str = "ab") -> PartFacts:
    return PartFacts(sha256, 100, first, last, 2 * (last - first + 1))


def note(
    broker: Broker, job_id: str, first: int, last: int, *, name: str = PART, holder: Holder = ME, sha256: str = "ab"
) -> str:
    digests = b"".join(wire.digest_of(payload(chunk)) for chunk in range(first, last + 1))
    size = sum(len(broker.jobs.result(job_id, chunk) or b"") for chunk in range(first, last + 1))
    part = facts(first, last, sha256)
    return broker.drains.note(job_id, holder.token, name, part, result_bytes=size, digests=digests)


def drained(broker: Broker, chunks: int = 3, *, done: int | None = None, parts: int = 2, seal: bool = True) -> str:
    job_id = new_job(broker, chunks, seal=seal)
    work(broker, job_id, *range(chunks if done is None else done))
    take(broker, job_id)
    assert note(broker, job_id, 0, parts - 1) == "ok"
    broker.drains.unlink(job_id, range(parts))
    return job_id


def test_a_result_stays_where_redis_came_back_without_the_note_of_its_part(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    work(broker, job_id, 0, 1)
    take(broker, job_id)
    assert note(broker, job_id, 0, 0) == "ok"
    broker.drains.unlink(job_id, [0, 1])
    assert not raw.exists(keys.chunk_result(job_id, 0))
    assert raw.exists(keys.chunk_result(job_id, 1))


def test_one_process_drains_at_a_time_and_the_next_is_told_who_does(broker: Broker) -> None:
    job_id = new_job(broker)
    assert take(broker, job_id) == DrainState(0, 0, 0, "/parts")
    assert broker.drains.take(job_id, OTHER, high_water=HIGH_WATER) == ME
    assert take(broker, job_id) == DrainState(0, 0, 0, "/parts"), "a lost answer: the same process asks again"


def test_the_right_goes_on_when_its_holder_gives_it_up_or_is_known_to_have_died(broker: Broker) -> None:
    job_id = new_job(broker)
    take(broker, job_id)
    broker.drains.take(job_id, ME, high_water=HIGH_WATER, lease_s=0)
    assert isinstance(broker.drains.take(job_id, OTHER, high_water=HIGH_WATER), DrainState)
    assert broker.drains.take(job_id, ME, high_water=HIGH_WATER) == OTHER
    assert isinstance(broker.drains.take(job_id, ME, high_water=HIGH_WATER, dead=OTHER.token), DrainState)


def test_a_lapsed_right_is_taken_over(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    take(broker, job_id)
    assert 0 < raw.pttl(keys.drainer(job_id)) <= keys.DRAINER_LEASE_S * 1000
    raw.delete(keys.drainer(job_id))
    take(broker, job_id, OTHER)
    work(broker, job_id, 0)
    assert note(broker, job_id, 0, 0) == "not_owner"
    assert note(broker, job_id, 0, 0, holder=OTHER) == "ok"


def test_a_cancelled_job_is_not_drained(broker: Broker) -> None:
    job_id = new_job(broker)
    broker.jobs.cancel(job_id)
    with pytest.raises(JobCancelled):
        take(broker, job_id)


def test_a_part_is_noted_once_whatever_answers_are_lost(broker: Broker) -> None:
    job_id = new_job(broker, 3)
    work(broker, job_id, 0, 1, 2)
    take(broker, job_id)
    before = broker.jobs.status(job_id)
    assert note(broker, job_id, 0, 1) == "ok"
    after = broker.jobs.status(job_id)
    assert after.result_bytes == before.result_bytes - 2 * len(RESULT)
    assert after.drained_chunks == 2
    assert broker.drains.state(job_id) == DrainState(2, 1, 0, "/parts")
    assert broker.drains.note(job_id, "me", PART, facts(0, 1), result_bytes=1000, digests=b"") == "ok", "once more"
    assert replace(broker.jobs.status(job_id), expires_in=after.expires_in) == after
    assert broker.drains.note(job_id, "x", PART, facts(0, 1), result_bytes=1000, digests=b"") == "ok", "whoever asks"


def test_another_part_for_the_same_chunks_or_of_the_same_name_is_refused(broker: Broker) -> None:
    job_id = drained(broker)
    assert note(broker, job_id, 2, 2, sha256="cd") == "already"
    assert note(broker, job_id, 1, 2, name="part-000001.parquet") == "missing", "chunk 1 is in a part"
    assert note(broker, job_id, 2, 2, name="part-000001.parquet") == "ok"


def test_a_part_of_a_chunk_that_is_not_counted_is_refused(broker: Broker) -> None:
    job_id = new_job(broker)
    take(broker, job_id)
    assert note(broker, job_id, 0, 0) == "missing"
    assert not broker.drains.is_drained(job_id, 0)


def test_the_bitmap_tells_drained_chunks_from_others(broker: Broker) -> None:
    job_id = drained(broker, 20, parts=9)
    assert list(broker.drains.chunks(job_id, 20, drained=True)) == list(range(9))
    assert list(broker.drains.chunks(job_id, 20, drained=False)) == list(range(9, 20))


def test_every_key_of_a_drain_has_a_lifetime_and_goes_with_the_job(broker: Broker, raw: Redis) -> None:
    job_id = drained(broker)
    left = {key: raw.pttl(key) for key in keys_of(raw, job_id)}
    assert {keys.drained(job_id), keys.parts(job_id), keys.digests(job_id)} < left.keys()
    assert all(ttl > 0 for ttl in left.values())
    for key in (keys.drained(job_id), keys.parts(job_id), keys.digests(job_id)):
        assert left[key] >= left[keys.job(job_id)] - 1000
    broker.upkeep.settle_slice(job_id)
    for key in (keys.drained(job_id), keys.parts(job_id), keys.digests(job_id)):
        assert raw.pttl(key) <= 1000_000
    broker.jobs.cancel(job_id)
    broker.upkeep.free(job_id, 3)
    broker.upkeep.remove(job_id)
    assert keys_of(raw, job_id) == set()


def test_the_same_corpus_skips_drained_chunks_and_another_is_refused(broker: Broker) -> None:
    job_id = drained(broker, seal=False)
    before = broker.jobs.status(job_id)
    assert [add(broker, job_id, chunk)[0] for chunk in range(3)] == [Added.SKIPPED] * 3
    assert add(broker, job_id, 1, word="other")[0] is Added.DIFFERS
    after = broker.jobs.status(job_id)
    assert (after.done, after.records, after.state) == (before.done, before.records, before.state)


def test_a_drained_job_is_held_back_while_redis_holds_many_results(broker: Broker, raw: Redis) -> None:
    broker.workers.beat(row())
    job_id = new_job(broker, 4)
    work(broker, job_id, 0, 1)
    take(broker, job_id, high_water=len(RESULT))
    assert broker.jobs.status(job_id).waits_for_reader
    assert take_all(broker) == []
    raw.delete(QUEUE)
    assert note(broker, job_id, 0, 0) == "ok"
    assert raw.llen(QUEUE) == 1
    assert not broker.jobs.status(job_id).waits_for_reader
    assert take_all(broker) == [2, 3]


def test_a_job_that_nobody_drains_is_not_held_back(broker: Broker) -> None:
    broker = Broker.connect(limited(broker.settings, results_high_water_bytes=1))
    job_id = new_job(broker, 3)
    work(broker, job_id, 0)
    assert broker.jobs.status(job_id).result_bytes == len(RESULT)
    assert take_all(broker) == [1, 2]


def test_a_job_made_to_be_drained_is_held_back_from_its_start(broker: Broker) -> None:
    job_id = new_job(broker, 3, results_high_water=1)
    work(broker, job_id, 0)
    assert take_all(broker) == []


def test_the_chunk_that_the_drainer_waits_for_is_given_in_any_case(broker: Broker) -> None:
    """After Redis came back without its last writes, there may be results of chunks that nobody was given."""
    job_id = new_job(broker, 3, results_high_water=1)
    work(broker, job_id, 1)
    assert take_all(broker) == [0]


def test_the_count_of_bytes_recovers_from_results_that_are_not_counted(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2)
    work(broker, job_id, 0)
    raw.hdel(keys.job(job_id), "result_bytes")
    take(broker, job_id)
    assert note(broker, job_id, 0, 0) == "ok"
    assert broker.jobs.status(job_id).result_bytes == 0


def test_a_full_redis_is_drained(own_broker: Broker, own_raw: Redis) -> None:
    """Nothing but a drain makes room in it, so a drain must need none."""
    broker, raw = own_broker, own_raw
    job_id = new_job(broker, 2)
    work(broker, job_id, 0, 1)
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] // 2)
    with pytest.raises(BrokerFull):
        add(broker, new_job(broker), 0)
    take(broker, job_id)
    assert note(broker, job_id, 0, 1) == "ok"
    broker.drains.unlink(job_id, [0, 1])
    assert not raw.exists(keys.chunk_result(job_id, 0), keys.chunk_result(job_id, 1))
