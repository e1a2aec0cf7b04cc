"""Every key of ours has a lifetime; progress renews it; and nothing is written for a job that is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from redis import Redis

from embedctl.jobs.aio import AsyncJob, discard_all
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.store import upkeep
from embedctl.store.batches import BatchStore, EventStore, Step
from embedctl.store.scripts import ScriptCall
from embedctl.store.stored_files import FileStore, Once, StoredFile
from embedctl.store.upkeep import ActiveJob
from embedctl_config import keys
from embedctl_config.errors import JobNotFound
from tests.support.jobs import last_event
from tests.support.store import (
    MINE,
    QUEUE,
    TTL_S,
    active_jobs,
    add,
    audited,
    claim,
    complete,
    keys_of,
    look_after,
    members,
    new_job,
    payload,
    score,
    some,
    spec,
    take,
    work,
)
from tests.support.waiting import eventually

#: How long a job of the usual TTL of these tests lives while it has not ended.
TTL_MS = keys.UNENDED_TTL_S * 1000
CHUNK_TTL_MS = TTL_MS * keys.CHUNK_TTL_FACTOR
#: Far less than TTL_MS, and more than a test takes on any machine.
NEARLY_OVER_MS = 600_000


def extend(broker: Broker, job_id: str, now_ms: int, interval_s: float) -> bool:
    (job,) = broker.upkeep.read([job_id])
    assert isinstance(job, ActiveJob)
    return broker.upkeep.extend(job, now_ms, interval_s)


def assert_gone(raw: Redis, job_id: str) -> None:
    assert keys_of(raw, job_id) == set()
    assert not [name for name in (keys.ACTIVE, keys.JOBS, keys.UPKEEP) if raw.zscore(name, job_id) is not None]


def without_lifetime(raw: Redis) -> list[bytes]:
    return [key for key in raw.scan_iter(match="embed:*", count=1000) if raw.pttl(key) < 0]


@pytest.mark.parametrize(
    "step",
    [
        lambda broker, job_id: add(broker, job_id, 1),
        lambda broker, job_id: claim(broker, job_id, 0),
        lambda broker, job_id: complete(broker, job_id, 0),
        lambda broker, job_id: broker.jobs.seal(job_id, 1),
    ],
    ids=["add", "claim", "complete", "seal"],
)
def test_progress_renews_a_job_and_its_key(broker: Broker, raw: Redis, step: Callable[[Broker, str], object]) -> None:
    job_id = new_job(broker, 1, seal=False, idempotency_key="nightly")
    for key in (keys.job(job_id), keys.idempotency("nightly")):
        raw.pexpire(key, NEARLY_OVER_MS)
    assert broker.jobs.status(job_id).expires_in <= timedelta(milliseconds=NEARLY_OVER_MS)
    step(broker, job_id)
    for key in (keys.job(job_id), keys.idempotency("nightly")):
        assert NEARLY_OVER_MS < raw.pttl(key) <= TTL_MS
    assert broker.jobs.status(job_id).expires_in > timedelta(milliseconds=NEARLY_OVER_MS)


def test_a_job_without_a_chunk_outlives_its_producer_by_minutes(broker: Broker, raw: Redis) -> None:
    """What a producer or a gateway leaves that died before the first chunk must not count as a job for days; nor must
    the keys of many that never had one fill Redis."""
    job_id, _ = broker.jobs.create(spec(idempotency_key="nightly"))
    both = keys.job(job_id), keys.idempotency("nightly")
    for token in ("p", "p", ""):  # takes the lease, then renews it; at last, there is a chunk
        for key in both:
            assert 0 < raw.pttl(key) <= 1000 * keys.UNBEGUN_TTL_S
            raw.pexpire(key, 1000 * keys.UNBEGUN_TTL_S // 2)
        if token:
            assert broker.jobs.hold(job_id, token)
            assert min(map(raw.pttl, both)) > 1000 * keys.UNBEGUN_TTL_S // 2
    assert not broker.jobs.hold(job_id, "another")
    assert take(broker) is None
    add(broker, job_id, 0)
    assert broker.jobs.hold(job_id, "p")
    assert min(map(raw.pttl, both)) > TTL_MS // 2


def test_questions_do_not_renew_a_lifetime(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1)
    raw.pexpire(keys.job(job_id), NEARLY_OVER_MS)
    broker.jobs.status(job_id)
    broker.jobs.ring("fp32", {QUEUE: MINE})
    audited(broker, job_id)
    broker.jobs.input(job_id, 0)
    assert raw.pttl(keys.job(job_id)) <= NEARLY_OVER_MS


def test_what_a_killed_worker_had_heard_is_not_kept_for_good(broker: Broker, raw: Redis) -> None:
    raw.hset(keys.UNACKED, "tag", b"bell")
    raw.zadd(keys.UNACKED_INDEX, {"tag": 1})
    broker.jobs.ring("fp32", {QUEUE: MINE})
    assert raw.pttl(keys.UNACKED) > 0
    assert raw.pttl(keys.UNACKED_INDEX) > 0


def test_inputs_and_results_outlive_the_job_itself(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3)
    work(broker, job_id, 0)
    work(broker, job_id, 1, failed=1)
    for key in (
        keys.chunk_input(job_id, 2),
        keys.chunk_input(job_id, 1),
        keys.chunk_result(job_id, 0),
        keys.events(job_id),
        keys.ACTIVE,
    ):
        assert TTL_MS < raw.pttl(key) <= CHUNK_TTL_MS, key


def test_events_of_an_ended_job_last_a_minute_and_begin_anew_in_a_retry(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2)
    work(broker, job_id, 0, failed=1)
    seen = last_event(broker, job_id, "0", 1.0)
    work(broker, job_id, 1)
    assert broker.jobs.status(job_id).state.ended
    assert 0 < raw.pttl(keys.events(job_id)) <= 60_000
    last = last_event(broker, job_id, seen, 1.0)
    assert last != seen, "who waits is told of the end"
    raw.unlink(keys.events(job_id))  # a minute later
    assert broker.jobs.retry(job_id, 0, 2, "p") == 1
    assert raw.pttl(keys.events(job_id)) > TTL_MS
    assert last_event(broker, job_id, last, 1.0) != last, "who waited before the end is told of what is new"


def test_extending_renews_every_chunk_once_a_quarter(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3)
    work(broker, job_id, 1)
    chunk_keys = [keys.chunk_input(job_id, 0), keys.chunk_result(job_id, 1), keys.retry_pointer(job_id, 2)]
    raw.set(chunk_keys[2], 3)

    def renewed_at(now_ms: int) -> set[bool]:
        for key in chunk_keys:
            raw.pexpire(key, 60_000)
        extend(broker, job_id, now_ms, 5.0)
        return {raw.pttl(key) > TTL_MS for key in chunk_keys}

    now, own_ms = broker.connection.now_ms(), int(TTL_S * 1000)
    assert renewed_at(now) == {False}  # they are new
    assert renewed_at(now + own_ms // 4) == {True}
    # A look at the job comes within a sixteenth of the TTL.
    assert renewed_at(now + own_ms // 4 + own_ms * 3 // 16 - 1) == {False}
    assert renewed_at(now + own_ms // 4 + own_ms * 3 // 16) == {True}


@pytest.mark.parametrize(("interval_s", "renewed"), [(5.0, [2, 4, 6, 8, 9, 9]), (62.5, [6, 9, 9]), (1000.0, [9, 9])])
def test_a_long_job_is_extended_by_slices_within_an_eighth_of_its_ttl(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch, interval_s: float, renewed: list[int]
) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 2)
    job_id = new_job(broker, 9)
    for chunk in range(9):
        raw.pexpire(keys.chunk_input(job_id, chunk), 60_000)
    now = broker.connection.now_ms() + TTL_MS // 4
    for count in renewed:
        assert extend(broker, job_id, now, interval_s) is (count < 9)
        left = [raw.pttl(keys.chunk_input(job_id, chunk)) for chunk in range(9)]
        assert sum(TTL_MS < each <= CHUNK_TTL_MS for each in left) == count
    assert 0 < raw.pttl(keys.cursors(job_id)) <= TTL_MS


@pytest.mark.parametrize(
    ("end", "waited"),
    [
        *((end, False) for end in ("completed", "running", "cancelled", "stopped", "submitting")),
        *((end, True) for end in ("completed", "retried", "cancelled", "stopped")),  # who has seen the end asks less
    ],
)
def test_discarding_leaves_nothing_of_a_job(broker: Broker, raw: Redis, end: str, *, waited: bool) -> None:
    job_id = new_job(broker, 3, seal=end != "submitting", idempotency_key="nightly")
    if end != "submitting":
        work(broker, job_id, 0, failed=1)
        claim(broker, job_id, 1)
    job = Job(job_id, broker)
    if end in ("completed", "retried"):
        work(broker, job_id, 2)
        complete(broker, job_id, 1)
    if end == "retried":
        assert job.retry_failed() == 1
        work(broker, job_id, 3)
    if end == "cancelled":
        broker.jobs.cancel(job_id)
    if end == "stopped":
        broker.jobs.stop(job_id)
    if waited:
        job.wait()
    job.discard()
    assert_gone(raw, job_id)
    assert not raw.exists(keys.idempotency("nightly"))
    with pytest.raises(JobNotFound):
        Job(job_id, broker).status()


def test_discarding_a_job_leaves_the_key_of_the_one_that_came_after_it(broker: Broker) -> None:
    first = new_job(broker, 1, idempotency_key="nightly")
    broker.jobs.cancel(first)
    second = new_job(broker, 1, idempotency_key="nightly")
    Job(first, broker).discard()
    assert broker.jobs.create(spec(idempotency_key="nightly")) == (second, False)


def test_discarding_several_leaves_nothing(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose end was seen take common round trips, one that goes on is cancelled, and one is gone already."""
    monkeypatch.setattr(upkeep, "_TOGETHER", 2)
    ended = [new_job(broker, 1, idempotency_key=key) for key in ("mine", None, "another's")]
    for job_id in ended:
        work(broker, job_id, 0)
    raw.set(keys.idempotency("another's"), "another job")
    running, gone = new_job(broker, 3), new_job(broker, 1)
    Job(gone, broker).discard()
    steps: list[str] = []
    remove = broker.upkeep.remove

    def noted(_: upkeep.Upkeep, job_id: str) -> None:
        steps.append(job_id)
        remove(job_id)

    monkeypatch.setattr(upkeep.Upkeep, "remove", noted)

    async def discard() -> None:
        jobs = [AsyncJob(Job(job_id, broker)) for job_id in (*ended, gone, running)]
        for job in jobs[: len(ended)]:
            await job.wait()
        await discard_all(jobs)
        await discard_all([])

    stop = ScriptCall("stop", [keys.job(running)], [running])
    assert broker.upkeep.remove_complete([broker.jobs.status(running)], [stop]) == set()
    assert broker.jobs.status(running).stopped_by == "stop", "what is asked beside is done though none is complete"
    asyncio.run(discard())
    assert steps == [running]
    for job_id in (*ended, running):
        assert_gone(raw, job_id)
    assert not raw.exists(keys.idempotency("mine"))
    assert raw.get(keys.idempotency("another's")) == b"another job"


@pytest.mark.parametrize("ttl_s", [100.0, 2.0 * keys.UNENDED_TTL_S])
def test_every_ended_job_is_tidied_though_one_is_damaged(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch, ttl_s: float
) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 1)
    bad, cancelled, stopped, failed, done = jobs = [new_job(broker, 2, ttl_s=ttl_s, max_errors=0) for _ in range(5)]
    broker.jobs.cancel(cancelled)
    work(broker, stopped, 0)
    for job_id in (bad, stopped):
        broker.jobs.stop(job_id)
    work(broker, failed, 0, failed=1)
    work(broker, done, 0, 1)
    assert {*jobs} - {*active_jobs(broker)} == {done}  # so small a job needs no reaper
    raw.hset(keys.counted(bad), "no", "bits")
    raw.expire(keys.counted(bad), 60)
    raw.zadd(keys.UPKEEP, dict.fromkeys(jobs, 1))
    look_after(broker, *jobs)
    assert members(raw, keys.UPKEEP) == active_jobs(broker) == [bad]
    assert score(raw, keys.UPKEEP, bad) > broker.connection.now_ms()
    assert all(raw.pttl(key) <= 1250 * ttl_s for job_id in jobs[1:] for key in keys_of(raw, job_id))

    def left(key: Callable[[str, int], str]) -> list[list[int]]:
        return [[chunk for chunk in range(2) if raw.exists(key(job_id, chunk))] for job_id in jobs]

    assert left(keys.chunk_input) == [[0, 1], [], [], [], []]
    assert left(keys.chunk_result) == [[], [], [0], [0], [0, 1]]


def test_a_job_is_kept_while_it_waits_however_short_its_ttl(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2, seal=False, ttl_s=1.0)
    job_keys = [keys.job(job_id), keys.chunk_input(job_id, 0), keys.chunk_input(job_id, 1)]
    assert all(raw.pttl(key) > TTL_MS - 60_000 for key in job_keys)
    work(broker, job_id, 0)
    broker.jobs.seal(job_id, 2)
    look_after(broker, job_id)
    job_keys[1] = keys.chunk_result(job_id, 0)
    assert all(raw.pttl(key) > TTL_MS - 60_000 for key in job_keys)


def test_a_short_ttl_counts_from_the_end(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_SLICE", 8)
    job_id = new_job(broker, 20, ttl_s=1000.0, idempotency_key="k")
    work(broker, job_id, *(chunk for chunk in range(20) if chunk != 1))
    work(broker, job_id, 1, failed=1)
    chunk_keys = [keys.chunk_result(job_id, chunk) for chunk in range(20)] + [keys.chunk_input(job_id, 1)]
    now_ms, shortened = broker.connection.now_ms(), []
    for _ in range(3):
        assert raw.pttl(keys.job(job_id)) > 1_000_000  # until all of its chunks are
        Reaper(broker)._look_after([job_id], now_ms, time.monotonic())  # no time is left after the first slice
        broker.upkeep.settle_slice(job_id)
        shortened.append(sum(raw.pttl(key) <= 1_250_000 for key in chunk_keys))
    assert shortened == [9, 17, 21]
    assert all(raw.pttl(key) > 1_000_000 for key in chunk_keys)
    for key in (keys.job(job_id), keys.idempotency("k"), keys.counted(job_id)):
        assert 800_000 < raw.pttl(key) <= 1_000_000
    assert not raw.exists(keys.cursors(job_id))
    assert raw.zscore(keys.ACTIVE, job_id) is None
    assert without_lifetime(raw) == []


def test_no_script_writes_anything_for_a_job_that_is_gone(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3, seal=False, idempotency_key="nightly")
    claim(broker, job_id, 0)
    raw.delete(*keys_of(raw, job_id))
    before = set(raw.scan_iter())
    report = [2, 0, 0, 10, 10, 3, b""]
    producer = keys.producer(job_id)
    source, target = keys.chunk_input(job_id, 0), keys.chunk_result(job_id, 0)
    scripts: dict[str, tuple[list[str], list[object]]] = {
        "hold": ([producer], ["p", 1000]),
        "add": ([producer, source, target], [0, bytes(16), 2, payload(0), "p", 1000]),
        "seal": ([producer], [3]),
        "renew": ([], [0, "t", 1000]),
        "release": ([], [0, "t", 1000, "it failed"]),
        "complete": ([source, target, keys.uncommitted_result(job_id, 0, "t")], [0, MINE, *report]),
        "reap": ([], [1000, 1000, 10, 1000, 3, 5000, 60_000]),
        "audit": ([], [0, keys.chunk_input(job_id, ""), keys.chunk_result(job_id, ""), 10]),
        "cancel": ([], []),
        "stop": ([], []),
        "resume": ([producer], ["p", 1000]),
        "settle": ([], [10]),
        "retry": ([producer, source, keys.retry_pointer(job_id, 0), keys.chunk_input(job_id, 3)], [0, 3, "p", 1000]),
        "drainer": ([keys.drainer(job_id)], ["d", "d m p h", 1000, 1000, "/parts", 4, ""]),
        "drop": ([source], [b"reference"]),
        "drain": ([keys.drainer(job_id)], ["d", 1000, "part-000000.parquet", "{}", 10, 0, 0, bytes(16)]),
    }
    for name, (more, args) in scripts.items():
        assert broker.connection.script(name, [keys.job(job_id), *more], [job_id, *args]) == ("gone", []), name
        assert set(raw.scan_iter()) == before, name


def test_a_call_for_the_next_chunk_forgets_a_job_that_is_gone(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 20)
    raw.delete(*keys_of(raw, job_id))
    assert take(broker) is None
    assert not [key for kind in ("flows", "left", "wait") for key in raw.scan_iter(keys.turns(f"{kind}:*"))]


def test_files_and_batches_live_for_a_time(broker: Broker, raw: Redis) -> None:
    before = set(raw.scan_iter())
    files, batches = FileStore(broker.connection, broker.chunk_files), BatchStore(broker.connection)
    ttl_s = 3 * keys.UNFINISHED_FILE_TTL_S

    def written(purpose: str) -> tuple[StoredFile, str]:
        writer = files.writer()
        writer.add(b"{}")
        file = writer.finish(tenant="a", name="f", purpose=purpose, ttl_s=ttl_s)
        part = keys.chunk_result(file.data, 0)
        assert raw.ttl(part) <= keys.UNFINISHED_FILE_TTL_S, "a kill before the file is made leaves it for long"
        return file, part

    requests, requests_part = written("batch")
    files.make(requests, Once("file", "digest", again=False))
    answers, answers_part = written("batch_output")
    batch_id = batches.new_id("batch_")
    batches.make(batch_id, {"tenant": "a"}, Once("batch", "digest", again=False))
    taken = some(batches.take("token", 30.0))
    steps: list[Callable[[], str | None]] = [
        lambda: batches.note(taken, "token", Step({"status": "in_progress"}, after="keep")),
        lambda: batches.cancel(batch_id, "a"),
        lambda: batches.note(taken, "token", Step({"status": "cancelled"}, after="end", files=[answers], told=True)),
    ]
    for step in steps:
        assert step() is not None
        assert not {name for name in set(raw.scan_iter()) - before if raw.pttl(name) < 0}
    assert min(raw.ttl(requests_part), raw.ttl(answers_part)) > ttl_s - 60
    events = EventStore(broker.connection)
    event = some(events.take("token", 30.0))
    assert (event.type, event.batch_id, event.tries) == ("batch.cancelled", batch_id, 0)
    events.note(event, "another token", None)

    def comes_again() -> bool:
        later = events.take("token", 30.0)
        return later is not None and later.tries == 1

    for next_s in (0.0, None):
        events.note(event, "token", next_s)
        assert not {name for name in set(raw.scan_iter()) - before if raw.pttl(name) < 0}
        assert (raw.exists(keys.UNTOLD) == 1) == (next_s == 0.0)
        if next_s == 0.0:
            eventually(comes_again)  # who takes them reckons the time to a few milliseconds
        else:
            assert events.take("token", 30.0) is None


def test_results_of_a_retried_job_live_again(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slices there are: what they have left is short."""
    monkeypatch.setattr(upkeep, "_SLICE", 8)
    job_id = new_job(broker, 20, ttl_s=20.0)
    work(broker, job_id, *range(1, 20))
    work(broker, job_id, 0, failed=1)
    while broker.upkeep.settle_slice(job_id):
        pass
    assert raw.pttl(keys.chunk_result(job_id, 17)) <= 25_000
    assert Job(job_id, broker).retry_failed() == 1
    assert not broker.upkeep.settle_slice(job_id)  # by a reaper that came too late
    look_after(broker, job_id)
    assert all(raw.pttl(keys.chunk_result(job_id, chunk)) > TTL_MS for chunk in range(20))
    assert raw.pttl(keys.job(job_id)) > TTL_MS - 60_000
