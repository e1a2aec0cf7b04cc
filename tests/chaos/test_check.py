"""A harness that can't fail proves nothing: each test does one kind of damage by hand, and the harness must see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from embedctl import Job, JobFailed, JobNotFound, JobState, WaitTimeout, enqueue_embeddings
from embedctl_config import keys, wire
from embedctl_config.wire import ChunkResult
from tests.chaos.check import Verdict, check_job, check_stopped, freed, keys_without_ttl, left_over, unknown_jobs
from tests.chaos.jobs import KEPT, DummyWorkload, Item, Plan
from tests.chaos.monitor import PRODUCER_ENDS_S, Monitor
from tests.chaos.options import Options
from tests.chaos.producers import Order, Producers
from tests.chaos.pulse import Pulse
from tests.chaos.rewinding import Waiter
from tests.chaos.stack import Stack
from tests.support.store import new_job
from tests.support.waiting import PATIENCE_S, eventually

POISONED = 5
PLAN = Plan(
    index=0,
    key="tampered with",
    kind="poison",
    model="dummy",
    hardware="quick",
    ttl_s=100,
    records=40,
    chunk_size=10,
    ids="field",
    keep=KEPT,
    poison={POISONED: "fail-encoder"},
)


@dataclasses.dataclass
class Checked:
    """An ended job that a test may damage."""

    stack: Stack
    workload: DummyWorkload
    job: Job

    def verdict(self) -> Verdict:
        return check_job(self.job, self.stack.broker, self.stack.raw, PLAN, self.workload.expected(PLAN))

    def rewrite(self, change: Callable[[ChunkResult], dict[str, Any]]) -> None:
        """Store the first chunk's result with a change."""
        key = keys.chunk_result(self.job.id, 0)
        result = wire.decode_result(self.stack.raw.get(key))
        self.stack.raw.set(key, wire.encode_result(dataclasses.replace(result, **change(result))), keepttl=True)


@contextmanager
def running(folder: Path, workers: int) -> Iterator[Stack]:
    stack = Stack(Options(minutes=1, seed=1, workers=workers, lease_s=1.0), folder)
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    """Its folder's path is short enough for a unix socket."""
    with TemporaryDirectory(prefix="ec-") as folder, running(Path(folder), workers=2) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """A Redis that holds nothing but its two workers."""
    shared_stack.raw.flushdb()
    shared_stack.wait_until_ready()
    return shared_stack


@pytest.fixture
def checked(stack: Stack) -> Checked:
    workload = DummyWorkload(stack.options)
    job = submit(stack, workload.items(PLAN))
    job.wait(timeout=60)
    return Checked(stack, workload, job)


def submit(stack: Stack, items: Iterable[Item], **options: Any) -> Job:
    return enqueue_embeddings(
        items,
        idempotency_key=PLAN.key,
        chunk_size=PLAN.chunk_size,
        ttl=PLAN.ttl_s,
        keep=PLAN.keep,
        settings=stack.settings,
        **options,
    )


def only_job(stack: Stack) -> Job:
    [job_id] = stack.raw.zrange(keys.JOBS, 0, -1)
    return Job(job_id.decode(), stack.broker)


def stopped_job(stack: Stack, items: list[Item]) -> Job:
    """A job whose budget runs out while it is submitted."""

    def slowly() -> Iterator[Item]:
        yield from items[:20]
        eventually(lambda: only_job(stack).status().state is JobState.FAILED)
        yield from items[20:]

    with pytest.raises(JobFailed):
        submit(stack, slowly(), max_errors=0)
    return only_job(stack)


def other_vectors(result: ChunkResult) -> dict[str, Any]:
    vectors = np.frombuffer(result.vectors, "<f4").copy()
    vectors[0] += 1e-3
    return {"vectors": vectors.tobytes()}


def no_errors(_: ChunkResult) -> dict[str, Any]:
    return {"errors": []}


def another_row_failed(result: ChunkResult) -> dict[str, Any]:
    return {"errors": [dataclasses.replace(result.errors[0], row=2)]}


def other_kept_fields(result: ChunkResult) -> dict[str, Any]:
    one, other, *rest = result.kept or []
    return {"kept": [other, one, *rest]}


def other_positions(result: ChunkResult) -> dict[str, Any]:
    return {"positions": [1, *range(1, result.rows)]}


def test_every_damage_is_seen(checked: Checked) -> None:
    raw, job_id = checked.stack.raw, checked.job.id
    key = keys.chunk_result(job_id, 0)
    assert checked.verdict() == Verdict()
    assert keys_without_ttl(raw) == []
    assert unknown_jobs(raw, {job_id}) == []
    sound = raw.get(key)
    for change, expected in (
        (other_vectors, Verdict(wrong_vectors=1)),
        (no_errors, Verdict(lost=1, wrong_errors=1)),
        (another_row_failed, Verdict(lost=1, doubled=1, wrong_errors=2)),
        (other_positions, Verdict(lost=1, doubled=1, wrong_vectors=1)),
    ):
        checked.rewrite(change)
        found = checked.verdict()
        assert counts_of(found) == counts_of(expected), change
        raw.set(key, sound, keepttl=True)
    checked.rewrite(other_kept_fields)
    assert checked.verdict().other == 2
    raw.set(key, sound, keepttl=True)

    raw.hincrby(keys.job(job_id), "done", 1)
    assert checked.verdict().other == 1
    raw.hincrby(keys.job(job_id), "done", -1)
    raw.hset(keys.owners(job_id), "1", "t w 1 1 1")
    assert checked.verdict().other == 1
    raw.delete(keys.owners(job_id))
    assert checked.verdict() == Verdict()

    raw.persist(key)
    assert keys_without_ttl(raw) == [key]
    assert unknown_jobs(raw, set()) == [job_id]
    raw.delete(key)
    with pytest.raises(JobNotFound):
        checked.verdict()


def test_what_is_noted_of_a_tenant_is_not_left_over_by_its_jobs(stack: Stack) -> None:
    job_id = new_job(stack.broker, tenant="a", keeps="1000000 0 0 1")
    noted = {keys.kept("a"), keys.QUOTAS}
    assert stack.raw.exists(*noted) == 2
    left = left_over(stack.raw)
    assert keys.job(job_id) in left
    assert not noted & left.keys()


def counts_of(verdict: Verdict) -> tuple[int, ...]:
    return verdict.lost, verdict.doubled, verdict.wrong_vectors, verdict.wrong_errors


def test_every_damage_of_a_stopped_job_is_seen(stack: Stack) -> None:
    plan = dataclasses.replace(PLAN, max_errors=0, blemishes=False)
    workload = DummyWorkload(stack.options)
    job = stopped_job(stack, workload.items(plan))
    raw, key = stack.raw, keys.chunk_result(job.id, 0)

    def verdict() -> Verdict:
        return check_stopped(job, stack.broker, raw, plan, workload.expected(plan))

    eventually(lambda: freed(raw, job.id, results=False) and raw.zscore(keys.ACTIVE, job.id) is None)
    assert verdict() == Verdict()
    raw.hset(keys.job(job.id), "state", "completed_with_errors")
    assert verdict().other == 1
    raw.hset(keys.job(job.id), "state", "failed")
    raw.hset(keys.job(job.id), "stopped_by", "somebody")
    assert verdict().other == 1
    raw.hset(keys.job(job.id), "stopped_by", "max_errors")
    raw.set(keys.chunk_input(job.id, 0), b"text", ex=100)
    assert verdict().other == 1
    raw.delete(keys.chunk_input(job.id, 0))
    raw.hset(keys.owners(job.id), "1", "t w 1 1 1")
    assert verdict().other == 1
    raw.delete(keys.owners(job.id))
    raw.hset(keys.job(job.id), "failed", 0)
    assert verdict().other == 2  # the budget was not spent, and there are more errors than the status says
    raw.hset(keys.job(job.id), "failed", 1)
    sound = raw.get(key)
    result = wire.decode_result(sound)
    for change, of in ((other_vectors, "wrong_vectors"), (no_errors, "lost"), (another_row_failed, "wrong_errors")):
        raw.set(key, wire.encode_result(dataclasses.replace(result, **change(result))), keepttl=True)
        assert getattr(verdict(), of) >= 1
        raw.set(key, sound, keepttl=True)
    assert verdict() == Verdict()


def monitor_of(stack: Stack) -> Monitor:
    workload = DummyWorkload(stack.options)
    return Monitor(stack, Producers(stack, workload, 0, 0.0), workload)


def test_a_producer_that_outlives_its_cancelled_job_is_told_of_and_ended(stack: Stack) -> None:
    monitor = monitor_of(stack)
    plan = dataclasses.replace(PLAN, kind="cancelled-full", high_water=1)
    order = Order(plan, stack.folder / "none", submitting=1)
    monitor.producers.orders.append(order)
    process = stack.spawn(["http.server", "0"], log_file=stack.folder / "stand-in.log")
    order.running.add(process)
    order.made(submit(stack, DummyWorkload(stack.options).items(PLAN), hardware="cpu").id)
    monitor._look(order)
    assert order.lingered_s == 0
    Job(order.ids[0], stack.broker).cancel()
    monitor._look(order)
    assert monitor.unended == []
    assert order.lingered_s > 0
    order.lingered_s = PRODUCER_ENDS_S
    monitor._look(order)
    assert len(monitor.unended) == 1
    assert process.wait(PATIENCE_S) == -9


def test_a_key_that_made_two_jobs_is_seen_where_redis_forgot_neither(stack: Stack) -> None:
    monitor = monitor_of(stack)
    first = submit(stack, DummyWorkload(stack.options).items(PLAN))
    order = Order(PLAN, stack.folder / "none", rewound=True)
    order.made("20200101-000000-0000000000")  # Redis forgot this job
    order.made(first.id)
    first.wait(timeout=60)
    monitor._look(order)
    monitor._look(order)
    assert order.settled
    assert monitor.verdicts == {}
    stack.raw.delete(keys.idempotency(PLAN.key))
    order.reopen()
    order.ids.remove("20200101-000000-0000000000")
    second = submit(stack, DummyWorkload(stack.options).items(PLAN))
    second.wait(timeout=60)
    monitor._look(order)
    monitor._look(order)
    assert monitor.verdicts[0].doubled == PLAN.records


def test_a_job_that_redis_forgot_and_nobody_made_again_is_lost(stack: Stack) -> None:
    monitor = monitor_of(stack)
    order = Order(PLAN, stack.folder / "none", rewound=True)
    order.made("20200101-000000-0000000000")
    monitor._look(order)
    assert monitor.verdicts[0].lost == PLAN.records


def test_redis_forgets_what_it_wrote_since_a_moment(short_folder: Path) -> None:
    with running(short_folder, workers=0) as stack:
        stack.raw.set("embed:before", 1, ex=100)
        written = stack.redis.written()
        assert written is not None
        stack.raw.set("embed:after", 1, ex=100)
        stack.stop_redis(kill=True)
        assert stack.redis.rewind(written)
        assert not stack.redis.rewind((written[0], written[1] + 1, written[2]))
        stack.start_redis()
        assert stack.raw.exists("embed:before")
        assert not stack.raw.exists("embed:after")


@pytest.mark.slow
def test_who_waits_for_what_never_comes_hangs(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    def wait_without_a_word(job: Job, timeout: float) -> None:
        waits.append(job.status().id)
        raise WaitTimeout

    monkeypatch.setattr("tests.chaos.rewinding.told_within_s", lambda _: 0.0)
    # This is how a library that never raises the error would behave.
    monkeypatch.setattr("embedctl.jobs.job.Job.wait", wait_without_a_word)
    job = submit(stack, DummyWorkload(stack.options).items(PLAN))
    eventually(lambda: job.status().state.ended)
    stack.raw.hset(keys.job(job.id), mapping={"state": "submitting", "sealed": "0"})
    stack.raw.hdel(keys.job(job.id), "original_chunks")  # otherwise it looks like an ended job being retried
    assert Waiter(stack, job.id).hangs()
    stack.raw.hset(keys.job(job.id), "records", PLAN.records + 1)
    waits.clear()
    waiter = Waiter(stack, job.id)
    eventually(lambda: len(waits) > 2)  # there is something to wait for
    stack.raw.delete(keys.job(job.id))
    assert not waiter.hangs()
    assert waiter.told.startswith("JobNotFound")


def test_a_worker_that_lives_and_is_silent_is_seen(stack: Stack) -> None:
    pulse = Pulse(stack)
    pulse.look()
    assert (pulse.silences, pulse.accused) == ([], set())
    worker = stack.workers[0]
    instance = stack.rows()[worker.pid].instance

    def seen() -> bool:
        """A beat of the worker may come between these steps; then they are done again."""
        stack.raw.zadd(keys.WORKERS, {instance: 1}, xx=True)
        stack.raw.set(keys.died(instance), "no word from it", ex=100)
        pulse.look()
        return bool(pulse.silences and pulse.accused)

    eventually(seen)
    assert [silence.worker for silence in pulse.silences] == [0]
    assert len(pulse.accused) == 1
