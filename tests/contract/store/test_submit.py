"""enqueue_embeddings without any worker: what it stores, resumes, refuses and cleans up, and how large chunks are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from redis import Redis

from embedctl import (
    BrokerUnavailable,
    CorpusChanged,
    InputError,
    Job,
    JobState,
    SettingsError,
    aenqueue_embeddings,
    enqueue_embeddings,
)
from embedctl.corpus.rows import Rows, records_of
from embedctl.jobs.enqueue import submit
from embedctl.jobs.estimate import estimate
from embedctl.jobs.offered import MAX_DIMENSIONS
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.store import ServedModel, workers
from embedctl_config import keys, wire
from embedctl_config.settings import Settings
from tests.support.store import DIM, MINE, members, row, take_all, work

TEXTS = [f"text {number}" for number in range(10)]


def test_every_text_is_stored_in_chunks_and_sealed(settings: Settings, broker: Broker, raw: Redis) -> None:
    job = enqueue_embeddings(TEXTS, chunk_size=4, ids=range(10), settings=settings)
    status = job.status()
    assert (status.state, status.sealed, status.records, status.chunks) == (JobState.QUEUED, True, 10, 3)
    chunks = [wire.decode_input(broker.jobs.input(job.id, at) or b"") for at in range(3)]
    assert [text.decode() for chunk in chunks for text in chunk.texts] == TEXTS
    assert [label for chunk in chunks for label in chunk.ids or []] == list(range(10))
    assert [chunk.first for chunk in chunks] == [0, 4, 8]
    assert take_all(broker) == [0, 1, 2]


@pytest.mark.parametrize("done", [False, True])
def test_another_corpus_is_told_by_its_first_record(settings: Settings, broker: Broker, done: bool) -> None:
    job = enqueue_embeddings(TEXTS, chunk_size=4, idempotency_key="k", settings=settings)
    if done:
        work(broker, job.id, 1)
    changed = [*TEXTS[:6], "another text", *TEXTS[7:]]
    with pytest.raises(CorpusChanged, match="record 6 is not the one"):
        enqueue_embeddings(changed, chunk_size=4, idempotency_key="k", settings=settings)


def test_a_corpus_that_is_longer_or_shorter_under_the_same_key_is_refused(settings: Settings) -> None:
    enqueue_embeddings(TEXTS[:8], chunk_size=4, idempotency_key="k", settings=settings)
    with pytest.raises(CorpusChanged, match="after record 7; the corpus now has more"):
        enqueue_embeddings(TEXTS, chunk_size=4, idempotency_key="k", settings=settings)
    with pytest.raises(CorpusChanged, match="holds 2 chunks, and the corpus now makes 1"):
        enqueue_embeddings(TEXTS[:4], chunk_size=4, idempotency_key="k", settings=settings)
    with pytest.raises(CorpusChanged, match="record 7"):
        enqueue_embeddings(TEXTS[:7], chunk_size=4, idempotency_key="k", settings=settings)


@pytest.mark.parametrize(
    "option",
    [
        {"prompt": "q: "},
        {"long": "mean"},
        {"normalize": False},
        {"dimensions": 2},
        {"chunk_size": 3},
        {"keep": ("title",)},
        {"count_tokens": True},
        {"model": "m"},
    ],
)
def test_other_options_under_the_same_key_are_refused_by_name(settings: Settings, option: dict[str, Any]) -> None:
    items = [{"text": text, "title": text.upper()} for text in TEXTS]
    enqueue_embeddings(items, chunk_size=4, idempotency_key="k", settings=settings)
    with pytest.raises(CorpusChanged, match=f"other options: .*{next(iter(option))} was"):
        enqueue_embeddings(items, **{"chunk_size": 4, **option}, idempotency_key="k", settings=settings)


@pytest.mark.parametrize(
    "option",
    [{"hardware": "slow"}, {"precision": "int8"}, {"max_errors": 5}, {"max_errors_share": 0.5}, {"ttl": 5000.0}],
)
def test_half_a_job_is_resumed_alike(settings: Settings, broker: Broker, raw: Redis, option: dict[str, Any]) -> None:
    def dies() -> Iterator[str]:
        yield from TEXTS[:5]
        raise KeyboardInterrupt

    def resume(texts: list[str], **options: Any) -> Job:
        raw.delete(keys.producer(job.id))
        return submit(broker, records_of(texts, Rows(100)), SubmitOptions(resume=job.id, **options))

    same: dict[str, Any] = {"prompt": "q: ", "chunk_size": 2, "max_errors": 3, "ttl": 1000.0}
    with pytest.raises(KeyboardInterrupt):
        submit(broker, records_of(dies(), Rows(100)), SubmitOptions.of(**same, idempotency_key="k"))
    (job,) = broker.jobs.newest()
    with pytest.raises((CorpusChanged, SettingsError), match=next(iter(option))):
        resume(TEXTS, **option)
    with pytest.raises(CorpusChanged, match="record 1"):
        resume([TEXTS[0], "other", *TEXTS[2:]])
    assert broker.jobs.status(job.id).state is JobState.SUBMITTING
    assert resume(TEXTS, prompt="q: ", chunk_size=2, model="dummy", hardware="auto", precision="fp32").id == job.id
    assert broker.jobs.status(job.id).records == 10


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 2.5}, "dimensions"),
        ({"dimensions": MAX_DIMENSIONS + 1}, "dimensions 65537 is not a whole number between 1 and 65536"),
        ({"hardware": "gpux"}, "gpux"),
        ({"precision": "fp8"}, "fp8"),
    ],
)
def test_wrong_options_are_refused(settings: Settings, raw: Redis, option: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        enqueue_embeddings(TEXTS, settings=settings, **option)
    assert raw.dbsize() == 0


def test_more_dimensions_than_a_live_workers_model_has_are_refused(settings: Settings, broker: Broker) -> None:
    broker.workers.beat(row(models={"dummy": ServedModel(MINE, 16, 1.0)}))
    broker.workers.beat(row("other", hardware="slow", models={"dummy": ServedModel(MINE, 8, 1.0)}))
    with pytest.raises(SettingsError, match="dimensions 17 is more than the 16 that vectors of dummy have"):
        enqueue_embeddings(TEXTS, dimensions=17, settings=settings)
    assert enqueue_embeddings(TEXTS, dimensions=16, settings=settings).status().options["dimensions"] == 16


def test_vectors_of_a_model_that_was_not_trained_for_it_are_cut_only_anyway(settings: Settings, broker: Broker) -> None:
    broker.workers.beat(row(models={"dummy": ServedModel(MINE, 16, 1.0, matryoshka=False)}))
    with pytest.raises(SettingsError, match=r"\(Matryoshka\).*--dims-anyway"):
        enqueue_embeddings(TEXTS, dimensions=8, settings=settings)
    enqueue_embeddings(TEXTS, dimensions=16, settings=settings)
    job = enqueue_embeddings(TEXTS, dimensions=8, dims_anyway=True, settings=settings)
    assert job.status().options["dims_anyway"] is True


def test_a_redis_that_is_too_old_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    Broker.shared(settings).close()  # else what is known of the server counts for a while
    monkeypatch.setattr("embedctl.store.connection.OLDEST_REDIS", (99, 0))
    with pytest.raises(BrokerUnavailable, match=r"needs 6\.2 or newer"):
        enqueue_embeddings(["text"], settings=settings)


@pytest.mark.parametrize(
    ("error", "key"), [(RuntimeError("x"), None), (KeyboardInterrupt(), None), (SystemExit(3), "k")]
)
def test_texts_may_end_in_an_error(error: BaseException, key: str | None, settings: Settings, broker: Broker) -> None:
    def texts() -> Iterator[str]:
        yield from TEXTS
        raise error

    with pytest.raises(type(error)):
        enqueue_embeddings(texts(), chunk_size=2, idempotency_key=key, settings=settings)
    (job,) = broker.jobs.newest()
    assert job.state is (JobState.SUBMITTING if key else JobState.CANCELLED)


def test_a_producer_may_give_up(settings: Settings, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_config.retry.RETRY_S", 0.2)
    submitting = Broker.connect(settings)

    monkeypatch.setattr(submitting.jobs, "add", Mock(side_effect=BrokerUnavailable("away")))
    with pytest.raises(BrokerUnavailable, match="--resume"):
        submit(submitting, records_of(TEXTS, Rows(100)), SubmitOptions())
    (job,) = broker.jobs.newest()
    assert job.state is JobState.SUBMITTING
    submitting.close()


def test_a_job_whose_ids_must_be_unique_is_cancelled_for_an_id_twice(broker: Broker, settings: Settings) -> None:
    texts = ["a", "b", "c", "d"]
    with pytest.raises(InputError, match="record 3: its id is that of record 1"):
        enqueue_embeddings(iter(texts), ids=[0, 1, None, 1], duplicates="error", chunk_size=1, settings=settings)
    assert [job.state for job in broker.jobs.newest()] == [JobState.CANCELLED]
    job = enqueue_embeddings(texts, ids=[None, None, 1, 2], duplicates="error", settings=settings)
    assert job.status().records == 4


LONG_TEXTS = [f"text {number:03} ".ljust(1900, "x") for number in range(96)]


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
    assert rows_of(broker, enqueue_embeddings(LONG_TEXTS, settings=settings)) == [24] * 4
    assert rows_of(broker, enqueue_embeddings(tuple(LONG_TEXTS), hardware="auto", settings=settings)) == [24] * 4
    awaited = asyncio.run(aenqueue_embeddings(LONG_TEXTS, settings=settings))
    assert rows_of(broker, Job.get(awaited.id, settings)) == [24] * 4


def test_workers_of_another_class_have_none(settings: Settings, broker: Broker) -> None:
    beat(broker, 2, hardware="slow")
    assert rows_of(broker, enqueue_embeddings(LONG_TEXTS, settings=settings)) == [96]


def test_a_key_finds_its_job_whoever_is_alive(settings: Settings, broker: Broker) -> None:
    beat(broker, 2)
    first = enqueue_embeddings(LONG_TEXTS, idempotency_key="k", settings=settings)
    leave(broker)
    assert enqueue_embeddings(LONG_TEXTS, idempotency_key="k", settings=settings).id == first.id
    beat(broker, 3, rate=500.0)
    assert enqueue_embeddings(iter(LONG_TEXTS), idempotency_key="k", settings=settings).id == first.id
    assert rows_of(broker, first) == [24] * 4


@pytest.mark.parametrize("by_key", [True, False])
def test_a_dead_submission_resumes_alike(settings: Settings, broker: Broker, raw: Redis, by_key: bool) -> None:
    def dying() -> Iterator[str]:
        yield from LONG_TEXTS[:41]
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
    job = submit(broker, records_of(LONG_TEXTS, Rows(10_000)), options, at_hand=True)
    assert job.id == job_id
    assert rows_of(broker, job) == [10] * 9 + [6]


def test_a_single_text_costs_no_further_question(settings: Settings, broker: Broker, raw: Redis) -> None:
    beat(broker, 2)
    raw.config_resetstat()
    enqueue_embeddings(["a text"], hardware="dummy", settings=settings)
    assert "cmdstat_mget" not in raw.info("commandstats")


def test_an_estimate_tells_the_chunks(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # what counts tokens, which decide nothing here
    records = list(records_of(LONG_TEXTS, Rows(10_000)))
    assert estimate(broker, records, SubmitOptions()).chunks == 1
    beat(broker, 2)
    told = estimate(broker, records, SubmitOptions(), at_hand=True)
    assert (told.chunks, told.records) == (4, 96)
    assert "chunks     4, of at most 512 records and 45,600 bytes" in told.describe()
