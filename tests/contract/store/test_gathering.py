"""Small chunks of several jobs in one batch: who is joined, who is not, and whose trouble stays whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from redis import Redis

from embedctl import Job, enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl.queueing.tickets import Ticket
from embedctl.store import Claimant, Doubts
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerRefused
from embedctl_config.settings import Settings
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.jobs import reference
from tests.support.rig import Rig
from tests.support.store import QUEUE


class Watched(DummyBackend):
    """A dummy that tells the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__(dim=16, poison=True)
        self.sizes: list[int] = []

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        self.sizes.append(len(rows))
        return super().forward(tokens, rows)


@pytest.fixture
def rig(broker: Broker, settings: Settings) -> Rig:
    return Rig(broker, settings, Watched(), gathers=True)


def texts_of(number: int) -> list[str]:
    return [f"job {number} text {row}" for row in range(3)]


def submit(settings: Settings, count: int, **options: Any) -> list[Job]:
    return [enqueue_embeddings(texts_of(number), settings=settings, **options) for number in range(count)]


def sizes(rig: Rig) -> list[int]:
    assert isinstance(rig.backend, Watched)
    return rig.backend.sizes[1:]  # the first is of the worker's own text


def take(raw: Redis) -> None:
    """Take the oldest ticket from its queue, as Celery does."""
    raw.rpop(QUEUE)


def assert_vectors(job: Job, texts: Sequence[str], failed: Sequence[int] = ()) -> None:
    good = [row for row in range(len(texts)) if row not in failed]
    np.testing.assert_array_equal(job.vectors()[good], reference([texts[row] for row in good]))


def test_small_jobs_that_wait_are_encoded_in_one_batch(rig: Rig, settings: Settings, raw: Redis) -> None:
    jobs = submit(settings, 5)
    take(raw)
    rig.run(jobs[0])
    assert sizes(rig) == [15]
    assert raw.llen(QUEUE) == 0
    for number, job in enumerate(jobs):
        assert (job.status().done, job.status().claims) == (3, 1)
        assert_vectors(job, texts_of(number))
    assert rig.runner.in_hand.all() == []
    assert rig.value("records_total", outcome="done") == 15
    assert rig.value("batch_seconds_count") == 1
    assert [rig.value("stage_seconds_count", stage=stage) for stage in ("tokenise", "encode", "store")] == [5, 5, 5]


@pytest.mark.parametrize(
    "options", [{"normalize": False}, {"prompt": "query: "}, {"truncation": "mean"}, {"dimensions": 4}]
)
def test_jobs_whose_options_decide_other_vectors_are_not_joined(
    rig: Rig, settings: Settings, raw: Redis, options: dict[str, Any]
) -> None:
    (first,), (other,) = submit(settings, 1), submit(settings, 1, **options)
    take(raw)
    rig.run(first)
    assert sizes(rig) == [3]
    assert (other.status().claims, raw.llen(QUEUE)) == (0, 1)


def test_a_chunk_that_was_claimed_before_is_joined_to_none(rig: Rig, settings: Settings, broker: Broker) -> None:
    first, tried = submit(settings, 2)
    broker.jobs.claim(tried.id, 0, "t", Claimant("other", rig.backend.fingerprint))
    broker.jobs.release(tried.id, 0, "t", delay_s=0)
    rig.run(first)
    assert sizes(rig) == [3]
    assert tried.status().claims == 1
    another = submit(settings, 1)[0]
    rig.run(tried)
    assert sizes(rig) == [3, 3]
    assert another.status().claims == 0


def test_a_large_chunk_is_joined_to_none_and_looks_for_none(rig: Rig, settings: Settings) -> None:
    long = ["word " * 400] * 2 + ["other " * 400]
    large = enqueue_embeddings(long, settings=settings)
    small, another = submit(settings, 2)
    rig.run(large)
    assert (small.status().claims, another.status().claims) == (0, 0)
    enqueue_embeddings(long, settings=settings)
    rig.run(small)
    assert sizes(rig)[-1] == 6
    assert another.status().done == 3


def test_a_record_that_fails_costs_only_its_own_job_one_record(rig: Rig, settings: Settings, raw: Redis) -> None:
    jobs = submit(settings, 4)
    bad = enqueue_embeddings(["good", "fail-encoder", "fine"], settings=settings)
    take(raw)
    rig.run(jobs[0])
    for number, job in enumerate(jobs):
        assert (job.status().done, job.status().failed) == (3, 0)
        assert_vectors(job, texts_of(number))
    assert [(error.position, error.code) for error in bad.errors()] == [(1, "encode_error")]
    assert (bad.status().done, sizes(rig)[0]) == (2, 15)


def test_a_claim_that_redis_refuses_costs_the_other_claims_nothing(
    rig: Rig, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, claim_all = submit(settings, 4), rig.broker.jobs.claim_all

    def one_is_refused(wanted: Any, by: Claimant) -> Any:
        first, _, last = wanted
        return [*claim_all([first], by), BrokerRefused("WRONGTYPE"), *claim_all([last], by)]

    monkeypatch.setattr(rig.broker.jobs, "claim_all", one_is_refused)
    rig.run(jobs[0])
    assert [job.status().done for job in jobs] == [3, 3, 0, 3]
    assert rig.runner.in_hand.all() == []


def test_a_worker_leaves_the_others_their_share(rig: Rig, settings: Settings, raw: Redis) -> None:
    jobs = submit(settings, 9)
    take(raw)
    raw.zadd(keys.queue_workers(QUEUE), {f"other {number}": 2**52 for number in range(4)})
    rig.run(jobs[0])
    assert [job.status().done for job in jobs] == [3] * 3 + [0] * 6


def test_all_joined_chunks_are_held_while_they_are_encoded(
    rig: Rig, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a death over one of them is a death over each, and the watchdog sees all of them move."""
    jobs = submit(settings, 3)
    forward = rig.backend.forward
    held: list[tuple[str, bool, bool]] = []

    def look(*args: Any) -> Any:
        held.extend((each.job_id, each.on_device, each.moving_since is not None) for each in rig.runner.in_hand.all())
        return forward(*args)

    monkeypatch.setattr(rig.backend, "forward", look)
    rig.run(jobs[0])
    assert sorted(held) == sorted((job.id, True, True) for job in jobs)


def test_a_message_that_names_no_chunk_is_left_in_its_queue(
    rig: Rig, settings: Settings, raw: Redis, broker: Broker
) -> None:
    first, other = submit(settings, 2)
    raw.delete(QUEUE)
    broker.tickets.forward(
        [Ticket(QUEUE, other.id, chunk, {"version": wire.VERSION}) for chunk in (-1, 2**40, cast(int, "0"))]
    )
    raw.rpush(QUEUE, b"no message at all")
    rig.run(first)
    assert (first.status().done, other.status().claims, raw.llen(QUEUE)) == (3, 0, 4)


def test_more_than_a_hundred_threads_may_wait_at_once(broker: Broker) -> None:
    with broker.connection.client() as client:
        pool = client.connection_pool
        taken = [pool.get_connection() for _ in range(120)]
        for each in taken:
            pool.release(each)


def test_a_worker_that_falls_sick_over_a_common_batch_notes_it_at_every_chunk_of_it(
    rig: Rig, settings: Settings, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = submit(settings, 3)

    def useless(*_: Any) -> Vectors:
        raise MemoryError("none left")

    monkeypatch.setattr(rig.backend, "forward", useless)
    rig.run(jobs[0])
    assert rig.left == [71]
    for job in jobs:
        noted = raw.hget(keys.attempts(job.id), "0:doubts")
        assert isinstance(noted, bytes)
        assert (list(Doubts.parse(noted).sick), job.status().failed) == (["me"], 0)
