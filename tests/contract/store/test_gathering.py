"""Small chunks of several jobs in one batch: who is joined, who is not, and whose trouble stays whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from redis import Redis

from embedctl import Job, enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl.store import Claimant, Doubts, Given
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.jobs import reference
from tests.support.rig import Rig
from tests.support.store import MINE, end_pause, lapse, leases, new_job, payload, reaped, some, take

#: Only chunks whose bytes are in Redis are gathered.
pytestmark = pytest.mark.in_redis


class Watched(DummyBackend):
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


def assert_vectors(job: Job, texts: Sequence[str], failed: Sequence[int] = ()) -> None:
    good = [row for row in range(len(texts)) if row not in failed]
    np.testing.assert_array_equal(job.vectors()[good], reference([texts[row] for row in good]))


def gathered(broker: Broker, job_id: str, token: str = "g", *, most_bytes: int = 10**6) -> Given:
    return broker.jobs.gather(broker.jobs.status(job_id), token, Claimant("w", MINE, "fp32"), most_bytes)


def jobs_in(given: Given) -> list[str]:
    assert {claim.chunk for claim in given.claims} <= {0}
    return [claim.job_id for claim in given.claims]


def test_small_jobs_that_wait_are_encoded_in_one_batch(rig: Rig, settings: Settings) -> None:
    jobs = submit(settings, 5)
    rig.run()
    assert sizes(rig) == [15]
    for number, job in enumerate(jobs):
        assert (job.status().done, job.status().claims) == (3, 1)
        assert_vectors(job, texts_of(number))
    assert rig.runner.in_hand.all() == []
    assert rig.value("records_total", outcome="done") == 15
    assert rig.value("batch_seconds_count") == 1
    assert [rig.value("stage_seconds_count", stage=stage) for stage in ("tokenise", "encode", "store")] == [5, 5, 5]


def test_others_are_given_in_the_order_of_lanes_and_tenants_each_with_its_lease(broker: Broker, raw: Redis) -> None:
    first = new_job(broker, 1, tenant="served")
    take(broker)
    given = [
        new_job(broker, 1, lane=lane, tenant=tenant)
        for lane, tenant in (("background", "a"), ("normal", "served"), ("normal", "new"), ("interactive", "a"))
    ]
    since = broker.connection.now_ms()
    found = gathered(broker, first)
    assert jobs_in(found) == given[::-1]
    assert {claim.input for claim in found.claims} == {payload(0)}
    for job_id in given:
        assert leases(raw, job_id)[0] >= since + 1000 * broker.settings.lease_s
        assert broker.jobs.renew(job_id, 0, "g") == "ok"
    assert jobs_in(gathered(broker, first)) == jobs_in(found)  # if the answer was lost
    assert jobs_in(gathered(broker, first, "h")) == []


def test_what_was_gathered_counts_for_its_tenants_turns(broker: Broker) -> None:
    first = new_job(broker, 1, tenant="c")
    take(broker)
    joined = new_job(broker, 1, tenant="a")
    assert jobs_in(gathered(broker, first)) == [joined]
    later = [new_job(broker, 1, tenant=tenant) for tenant in ("a", "b")]
    turns = [take(broker, str(at)) for at in range(2)]
    assert [claim and claim.job_id for claim in turns] == later[::-1]


def test_no_more_bytes_are_given_than_there_is_room_for(broker: Broker) -> None:
    first = new_job(broker, 1)
    take(broker)
    for _ in range(3):
        new_job(broker, 1)
    size = len(payload(0))
    rooms = (size - 1, 3 * size - 1, size)
    assert [len(gathered(broker, first, str(room), most_bytes=room).claims) for room in rooms] == [0, 2, 1]


@pytest.mark.parametrize("options", [{"normalize": False}, {"prompt": "query: "}, {"long": "mean"}, {"dimensions": 4}])
def test_jobs_of_other_options_are_not_joined(rig: Rig, settings: Settings, options: dict[str, Any]) -> None:
    jobs = submit(settings, 1) + submit(settings, 1, **options)
    rig.run()
    assert sizes(rig) == [3]
    assert sorted(job.status().claims for job in jobs) == [0, 1]
    rig.run()
    assert [job.status().done for job in jobs] == [3, 3]


@pytest.mark.parametrize("dies", [False, True])
def test_a_chunk_that_was_tried_is_joined_to_none(broker: Broker, raw: Redis, *, dies: bool) -> None:
    first = new_job(broker, 1)
    take(broker)
    tried = new_job(broker, 1)
    assert take(broker, "tried")
    if dies:
        lapse(raw, tried, 0)
        assert reaped(broker, tried) == [0]
        end_pause(broker, raw, tried, 0)
    else:
        assert broker.jobs.release(tried, 0, "tried", delay_s=0)
    assert jobs_in(gathered(broker, first)) == []
    again = some(take(broker, "u"))
    assert (again.job_id, again.attempt, again.given_up) == (tried, 2, frozenset() if dies else None)


def test_none_is_joined_to_a_chunk_that_somebody_had(rig: Rig, settings: Settings, broker: Broker) -> None:
    (tried,) = submit(settings, 1)
    assert take(broker, instance="other", fingerprint=rig.backend.fingerprint)
    broker.jobs.release(tried.id, 0, "t", delay_s=0)
    (another,) = submit(settings, 1, chunk_size=2)
    rig.run()
    assert sizes(rig) == [3]
    assert (tried.status().done, another.status().claims) == (3, 0)


def test_a_large_chunk_is_joined_to_none_and_looks_for_none(rig: Rig, settings: Settings) -> None:
    large = enqueue_embeddings(["word " * 1000], settings=settings)
    small = submit(settings, 2, chunk_size=2)
    rig.run()
    assert [job.status().done for job in (large, *small)] == [1, 0, 0]
    large = enqueue_embeddings(["word " * 1000] * 3, chunk_size=1, settings=settings)
    rig.run()
    # The rest of its own job too; of the other small one, a chunk or both: the order of a queue's lists is any.
    assert sizes(rig)[-1] in (5, 6)
    assert large.status().done == 0


def test_a_record_that_fails_costs_only_its_own_job_one_record(rig: Rig, settings: Settings) -> None:
    jobs = submit(settings, 4)
    bad = enqueue_embeddings(["good", "fail-encoder", "fine"], settings=settings)
    rig.run()
    for number, job in enumerate(jobs):
        assert (job.status().done, job.status().failed) == (3, 0)
        assert_vectors(job, texts_of(number))
    assert [(error.position, error.code) for error in bad.errors()] == [(1, "encode_error")]
    assert (bad.status().done, sizes(rig)[0]) == (2, 15)


def test_a_damaged_job_costs_the_others_nothing(rig: Rig, settings: Settings, raw: Redis) -> None:
    jobs = submit(settings, 4)
    raw.set(keys.owners(jobs[2].id), "somebody else's")
    rig.run()
    assert [job.status().done for job in jobs] == [3, 3, 0, 3]
    assert (jobs[2].status().trouble or "").startswith(f"damaged: {keys.owners(jobs[2].id)} is a string")
    assert rig.runner.in_hand.all() == []


def test_all_joined_chunks_are_held(rig: Rig, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a death over one of them is a death over each, and the watchdog sees all of them move."""
    jobs = submit(settings, 3)
    forward = rig.backend.forward
    held: list[tuple[str, bool, bool]] = []

    def look(*args: Any) -> Any:
        held.extend((each.job_id, each.on_device, each.moving_since is not None) for each in rig.runner.in_hand.all())
        return forward(*args)

    monkeypatch.setattr(rig.backend, "forward", look)
    rig.run()
    assert sorted(held) == sorted((job.id, True, True) for job in jobs)


def test_more_than_a_hundred_threads_may_wait_at_once(broker: Broker) -> None:
    with broker.connection.client() as client:
        pool = client.connection_pool
        taken = [pool.get_connection() for _ in range(120)]
        for each in taken:
            pool.release(each)


def test_sickness_is_noted_by_chunk(rig: Rig, settings: Settings, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = submit(settings, 3)

    def useless(*_: Any) -> Vectors:
        raise MemoryError("none left")

    monkeypatch.setattr(rig.backend, "forward", useless)
    rig.run()
    assert rig.left == [71]
    for job in jobs:
        noted = raw.hget(keys.attempts(job.id), "0:doubts")
        assert isinstance(noted, bytes)
        assert (list(Doubts.parse(noted).sick), job.status().failed) == (["me"], 0)
