"""The limits of a job's chunks: chosen once, by the workers that live then, and stored with the job."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from embedctl import Job, aenqueue_embeddings, enqueue_embeddings
from embedctl.corpus.rows import Rows, records_of
from embedctl.jobs.enqueue import submit
from embedctl.jobs.estimate import estimate
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.store import ServedModel, workers
from embedctl_config import keys, wire
from embedctl_config.settings import Settings
from tests.support.store import DIM, MINE, members, row

TEXTS = [f"text {number:03} ".ljust(1900, "x") for number in range(96)]


@pytest.fixture(autouse=True)
def new_offers(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers offer is read each time."""
    monkeypatch.setattr(workers, "OFFERS_S", 0.0)
    Broker.shared(settings).workers._offers_until = 0.0


def beat(broker: Broker, count: int, rate: float = 0.0, **changes: Any) -> None:
    """That many workers that reach this rate with large chunks."""
    served = {"dummy": ServedModel(MINE, DIM, 10.0, sustained_tokens_per_s=rate, max_tokens=8192)}
    for number in range(count):
        broker.workers.beat(row(f"w{number}", models=served, **changes))


def leave(broker: Broker) -> None:
    for worker in list(broker.workers.alive()):
        broker.workers.leave(worker)


def rows_of(broker: Broker, job: Job) -> list[int]:
    """The records of each chunk, as they wait in Redis."""
    inputs = [broker.jobs.input(job.id, chunk) for chunk in range(job.status().chunks)]
    return [len(wire.decode_input(each)) for each in inputs if each]


def test_each_live_worker_has_a_part(settings: Settings, broker: Broker) -> None:
    beat(broker, 2)
    assert rows_of(broker, enqueue_embeddings(TEXTS, settings=settings)) == [24] * 4
    assert rows_of(broker, enqueue_embeddings(tuple(TEXTS), hardware="auto", settings=settings)) == [24] * 4
    awaited = asyncio.run(aenqueue_embeddings(TEXTS, settings=settings))
    assert rows_of(broker, Job.get(awaited.id, settings)) == [24] * 4


def test_workers_of_another_class_have_none(settings: Settings, broker: Broker) -> None:
    beat(broker, 2, hardware="slow")
    assert rows_of(broker, enqueue_embeddings(TEXTS, settings=settings)) == [96]


def test_a_key_finds_its_job_whoever_is_alive(settings: Settings, broker: Broker) -> None:
    beat(broker, 2)
    first = enqueue_embeddings(TEXTS, idempotency_key="k", settings=settings)
    leave(broker)
    assert enqueue_embeddings(TEXTS, idempotency_key="k", settings=settings).id == first.id
    beat(broker, 3, rate=500.0)
    assert enqueue_embeddings(iter(TEXTS), idempotency_key="k", settings=settings).id == first.id
    assert rows_of(broker, first) == [24] * 4


@pytest.mark.parametrize("by_key", [True, False])
def test_a_dead_submission_resumes_alike(settings: Settings, broker: Broker, raw: Redis, by_key: bool) -> None:
    def dying() -> Iterator[str]:
        yield from TEXTS[:41]
        raise RuntimeError("the power went")

    beat(broker, 2, rate=19_500 / 4.2 / 2)
    with pytest.raises(RuntimeError):
        enqueue_embeddings(dying(), idempotency_key="k", settings=settings)
    (job_id,) = members(raw, keys.ACTIVE)
    assert rows_of(broker, Job.get(job_id, settings)) == [10] * 4
    raw.delete(keys.producer(job_id))
    leave(broker)
    beat(broker, 5)
    options = SubmitOptions(idempotency_key="k") if by_key else SubmitOptions(resume=job_id)
    job = submit(broker, records_of(TEXTS, Rows(10_000)), options, at_hand=True)
    assert job.id == job_id
    assert rows_of(broker, job) == [10] * 9 + [6]


def test_a_single_text_costs_no_further_question(settings: Settings, broker: Broker, raw: Redis) -> None:
    beat(broker, 2)
    raw.config_resetstat()
    enqueue_embeddings(["a text"], hardware="dummy", settings=settings)
    assert "cmdstat_mget" not in raw.info("commandstats")


def test_an_estimate_tells_the_chunks(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # what counts tokens, which decide nothing here
    records = list(records_of(TEXTS, Rows(10_000)))
    assert estimate(broker, records, SubmitOptions()).chunks == 1
    beat(broker, 2)
    told = estimate(broker, records, SubmitOptions(), at_hand=True)
    assert (told.chunks, told.records) == (4, 96)
    assert "chunks     4, of at most 512 records and 45,600 bytes" in told.describe()
