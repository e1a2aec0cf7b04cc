"""enqueue_embeddings without any worker: what it stores, resumes, refuses and cleans up."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from embedctl import (
    BrokerUnavailable,
    CorpusChanged,
    InputError,
    Job,
    JobState,
    JobStatus,
    SettingsError,
    aenqueue_embeddings,
    enqueue_embeddings,
)
from embedctl.broker import Broker
from embedctl.enqueue import submit
from embedctl.job_options import SubmitOptions
from embedctl.records import records_of
from embedctl.store import ServedModel
from embedctl_config import keys, wire
from embedctl_config.settings import Settings
from tests.support.limits import limited
from tests.support.store import MINE, QUEUE, active_jobs, claim, complete, pass_ms, row, work
from tests.support.waiting import PATIENCE_S, eventually

TEXTS = [f"text {number}" for number in range(10)]


def test_every_text_is_stored_in_chunks_and_sealed(settings: Settings, broker: Broker, raw: redis_py.Redis) -> None:
    job = enqueue_embeddings(TEXTS, chunk_size=4, ids=range(10), settings=settings)
    status = job.status()
    assert (status.state, status.sealed, status.records, status.chunks) == (JobState.QUEUED, True, 10, 3)
    chunks = [wire.decode_input(broker.jobs.input(job.id, at) or b"") for at in range(3)]
    assert [text.decode() for chunk in chunks for text in chunk.texts] == TEXTS
    assert [label for chunk in chunks for label in chunk.ids or []] == [str(number) for number in range(10)]
    assert [chunk.first for chunk in chunks] == [0, 4, 8]
    assert raw.llen(QUEUE) == 3


def test_no_texts_are_a_job_that_has_completed(settings: Settings) -> None:
    job = enqueue_embeddings(iter([]), settings=settings)
    assert job.status().state is JobState.COMPLETED
    assert job.vectors().shape == (0, 0)


def test_a_window_of_tickets_is_sent_and_no_more(settings: Settings, raw: redis_py.Redis) -> None:
    enqueue_embeddings(TEXTS, chunk_size=1, settings=limited(settings, window=4))
    assert raw.llen(QUEUE) == 4


@pytest.mark.parametrize("done", [False, True])
def test_another_corpus_under_the_same_key_names_the_first_record_that_differs(
    settings: Settings, broker: Broker, done: bool
) -> None:
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
    ("option", "name"),
    [
        ({"prompt": "query: "}, "prompt"),
        ({"truncation": "error"}, "truncation"),
        ({"truncation": "mean"}, "truncation"),
        ({"normalize": False}, "normalize"),
        ({"dimensions": 2}, "dimensions"),
        ({"chunk_size": 3}, "chunk_size"),
        ({"model": "another"}, "model"),
    ],
)
def test_other_options_under_the_same_key_are_refused_by_name(
    settings: Settings, option: dict[str, Any], name: str
) -> None:
    enqueue_embeddings(TEXTS, chunk_size=4, idempotency_key="k", settings=settings)
    with pytest.raises(CorpusChanged, match=f"other options: .*{name} was"):
        enqueue_embeddings(TEXTS, **{"chunk_size": 4, **option}, idempotency_key="k", settings=settings)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": 2.5}, "chunk_size 2.5 is not a whole number"),
        ({"chunk_size": "2"}, "chunk_size '2' is not a whole number"),
        ({"chunk_size": True}, "chunk_size True is not a whole number"),
        ({"ttl": 0.5}, "ttl"),
        ({"ttl": "60"}, "ttl '60' is not between"),
        ({"ttl": True}, "ttl True is not between"),
        ({"truncation": "cut"}, "cut"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -3}, "dimensions"),
        ({"dimensions": 2.5}, "dimensions"),
        ({"dimensions": "2"}, "dimensions"),
        ({"dimensions": True}, "dimensions True is not a whole number"),
        ({"model": "a b"}, "a b"),
        ({"hardware": "gpux"}, "gpux"),
        ({"precision": "fp8"}, "fp8"),
        ({"precision": "int8"}, "int8"),
        ({"idempotency_key": ""}, "idempotency_key is empty"),
        ({"idempotency_key": 7}, "idempotency_key is a number, not a string"),
        ({"prompt": ["a"]}, "prompt is a list, not a string"),
        ({"max_errors": 2.5}, "max_errors 2.5 is neither"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_stored(
    settings: Settings, raw: redis_py.Redis, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        enqueue_embeddings(TEXTS, settings=settings, **option)
    assert raw.dbsize() == 0


def test_more_dimensions_than_a_live_workers_model_has_are_refused(settings: Settings, broker: Broker) -> None:
    broker.workers.beat(row(models={"dummy": ServedModel(MINE, 16, 1.0)}))
    broker.workers.beat(row("other", hardware="slow", models={"dummy": ServedModel(MINE, 8, 1.0)}))
    with pytest.raises(SettingsError, match="dimensions 17 is more than the 16 that vectors of dummy have"):
        enqueue_embeddings(TEXTS, dimensions=17, settings=settings)
    assert enqueue_embeddings(TEXTS, dimensions=16, settings=settings).status().options["dimensions"] == 16


@pytest.mark.in_redis
def test_a_job_its_tickets_and_its_chunks_say_their_version(
    settings: Settings, broker: Broker, raw: redis_py.Redis
) -> None:
    job = enqueue_embeddings(TEXTS, settings=settings)
    assert raw.hget(keys.job(job.id), "version") == str(wire.VERSION).encode()
    data = broker.jobs.input(job.id, 0)
    assert data is not None
    assert data[5] == wire.VERSION
    message = json.loads(raw.lrange(job.status().queue, 0, 0)[0])
    assert json.loads(base64.b64decode(message["body"]))[1]["version"] == wire.VERSION


def test_a_redis_that_is_too_old_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    Broker.shared(settings).close()  # else what is known of the server counts for a while
    monkeypatch.setattr("embedctl.store.connection.OLDEST_REDIS", (99, 0))
    with pytest.raises(BrokerUnavailable, match=r"needs 6\.2 or newer"):
        enqueue_embeddings(["text"], settings=settings)


def test_a_producer_that_waits_for_workers_is_as_patient_as_any(
    settings: Settings, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedctl_config.retry.RETRY_S", 0.5)
    low = Broker.connect(limited(settings, high_water_bytes=1024))
    jobs: list[Job] = []
    texts = ["x" * 500 for _ in range(3)]
    producer = threading.Thread(
        target=lambda: jobs.append(submit(low, records_of(texts, max_bytes=10_000), SubmitOptions(chunk_size=1)))
    )
    producer.start()
    eventually(lambda: [broker.jobs.status(each).chunks for each in active_jobs(broker)] == [2])
    (job_id,) = active_jobs(broker)
    pass_ms(broker, 800)  # more than an outage may take
    asked, status = [], low.jobs.status

    def refuse_once(of: str) -> JobStatus:
        asked.append(of)
        if len(asked) == 1:
            raise BrokerUnavailable("away for a moment")
        return status(of)

    monkeypatch.setattr(low.jobs, "status", refuse_once)
    eventually(lambda: len(asked) >= 2)
    for chunk in range(3):
        eventually(lambda: broker.jobs.status(job_id).chunks > chunk)  # noqa: B023  (it is called in this turn)
        claim(broker, job_id, chunk, str(chunk))
        assert complete(broker, job_id, chunk, str(chunk)) == "ok"
    producer.join(PATIENCE_S)
    low.close()
    assert [job.id for job in jobs] == [job_id]


@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("key", [None, "k"])
def test_whatever_ends_the_texts_ends_a_job_that_nobody_has_a_name_for(
    error: BaseException, key: str | None, settings: Settings, broker: Broker
) -> None:
    def texts() -> Iterator[str]:
        yield from TEXTS
        raise error

    with pytest.raises(type(error)):
        enqueue_embeddings(texts(), chunk_size=2, idempotency_key=key, settings=settings)
    (job,) = broker.jobs.newest()
    assert job.state is (JobState.SUBMITTING if key else JobState.CANCELLED)


def test_a_producer_that_gives_up_because_redis_is_away_leaves_its_job_to_be_resumed(
    settings: Settings, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedctl_config.retry.RETRY_S", 0.2)
    submitting = Broker.connect(settings)

    def away(*_: object, **__: object) -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(submitting.jobs, "add", away)
    with pytest.raises(BrokerUnavailable, match="--resume"):
        submit(submitting, records_of(TEXTS, max_bytes=100), SubmitOptions())
    (job,) = broker.jobs.newest()
    assert job.state is JobState.SUBMITTING
    submitting.close()


def test_a_job_whose_ids_must_be_unique_is_cancelled_for_an_id_twice(broker: Broker, settings: Settings) -> None:
    texts = ["a", "b", "c", "d"]
    with pytest.raises(InputError, match="record 3: its id is that of record 1"):
        enqueue_embeddings(iter(texts), ids=["0", "1", None, 1], duplicates="error", chunk_size=1, settings=settings)
    with pytest.raises(InputError, match="2 ids are not unique"):
        asyncio.run(aenqueue_embeddings(iter(texts), ids=["0", "0", "1", "1"], duplicates="error", settings=settings))
    assert [job.state for job in broker.jobs.newest()] == [JobState.CANCELLED] * 2
    job = enqueue_embeddings(texts, ids=[None, None, 1, 2], duplicates="error", settings=settings)
    assert job.status().records == 4
