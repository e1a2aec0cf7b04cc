"""enqueue_embeddings without any worker: what it stores, resumes, refuses and cleans up."""

from __future__ import annotations

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
    enqueue_embeddings,
)
from embedctl.broker import Broker
from embedctl.enqueue import submit
from embedctl.job_options import SubmitOptions
from embedctl.records import RecordLike, records_of
from embedctl.store import Completed, ServedModel
from embedctl_config import keys, wire
from embedctl_config.settings import Settings
from tests.support.store import MINE, QUEUE, claim, complete, members, pass_ms, row
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
    enqueue_embeddings(TEXTS, chunk_size=1, settings=settings.replace(window=4))
    assert raw.llen(QUEUE) == 4


def test_the_same_key_and_texts_give_the_same_job(settings: Settings) -> None:
    first = enqueue_embeddings(TEXTS, idempotency_key="k", settings=settings)
    second = enqueue_embeddings(iter(TEXTS), idempotency_key="k", settings=settings)
    assert first.id == second.id
    assert second.status().records == 10


def test_a_submission_that_died_is_taken_up_where_it_stopped(settings: Settings, raw: redis_py.Redis) -> None:
    def dying() -> Iterator[str]:
        yield from TEXTS[:7]
        raise RuntimeError("the power went")

    with pytest.raises(RuntimeError):
        enqueue_embeddings(dying(), chunk_size=2, idempotency_key="k", settings=settings)
    (job_id,) = members(raw, keys.ACTIVE)
    half = Job.get(job_id, settings).status()
    assert (half.state, half.chunks) == (JobState.SUBMITTING, 3)
    raw.delete(keys.producer(job_id))
    job = enqueue_embeddings(TEXTS, chunk_size=2, idempotency_key="k", settings=settings)
    assert job.id == job_id
    assert (job.status().records, job.status().sealed) == (10, True)


def test_a_submission_without_a_key_that_can_not_be_read_is_cancelled(
    settings: Settings, broker: Broker, raw: redis_py.Redis
) -> None:
    records: list[RecordLike] = [*TEXTS[:7], {"body": "x"}]
    with pytest.raises(InputError, match="record 7"):
        enqueue_embeddings(iter(records), chunk_size=2, settings=settings)
    (job_id,) = members(raw, keys.ACTIVE)
    assert broker.jobs.status(job_id).state is JobState.CANCELLED


@pytest.mark.parametrize("done", [False, True])
def test_another_corpus_under_the_same_key_names_the_first_record_that_differs(
    settings: Settings, broker: Broker, done: bool
) -> None:
    job = enqueue_embeddings(TEXTS, chunk_size=4, idempotency_key="k", settings=settings)
    if done:
        source = broker.jobs.input(job.id, 1) or b""
        claim(broker, job.id, 1)
        store_result(broker, job.id, 1, source)
    changed = [*TEXTS[:6], "another text", *TEXTS[7:]]
    with pytest.raises(CorpusChanged, match="record 6 is not the one"):
        enqueue_embeddings(changed, chunk_size=4, idempotency_key="k", settings=settings)


def store_result(broker: Broker, job_id: str, chunk: int, source: bytes) -> None:
    """Complete a chunk of four records with its own digest and checksums."""
    found = wire.decode_input(source)
    payload = wire.encode_result(
        wire.ChunkResult(
            first=found.first,
            rows=len(found),
            dim=1,
            digest=wire.digest_of(source),
            fingerprint="aa" * 32,
            precision="fp32",
            backend="dummy",
            vectors=bytes(4 * len(found)),
            checksums=found.row_checksums(),
        )
    )
    report = Completed(len(found), 0, 0, 1, 1)
    assert broker.jobs.complete(job_id, chunk, "t", payload, report, fingerprint="aa" * 32) == "ok"


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
    "option",
    [
        {"chunk_size": 0},
        {"ttl": 0.5},
        {"truncation": "cut"},
        {"dimensions": 0},
        {"dimensions": -3},
        {"dimensions": 2.5},
        {"dimensions": "2"},
        {"model": "a b"},
        {"hardware": "gpux"},
        {"precision": "fp8"},
        {"precision": "int8"},
    ],
)
def test_wrong_options_are_refused_before_anything_is_stored(
    settings: Settings, raw: redis_py.Redis, option: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError):
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


def test_a_producer_pauses_while_more_text_waits_than_the_mark(settings: Settings, broker: Broker) -> None:
    low = Broker.connect(settings.replace(high_water_bytes=1024))
    texts = ["x" * 500 for _ in range(6)]
    seen: list[tuple[int, str]] = []
    jobs: list[Job] = []
    options = SubmitOptions(chunk_size=1)

    def run() -> None:
        jobs.append(submit(low, records_of(texts, max_bytes=10_000), options, lambda *told: seen.append(told)))

    producer = threading.Thread(target=run)
    producer.start()
    eventually(lambda: any(added == 2 and what.startswith("workers to make room") for added, what in seen))
    (job_id,) = broker.upkeep.active_jobs()
    assert producer.is_alive()
    waiting = broker.jobs.status(job_id)
    assert (waiting.chunks, waiting.state) == (2, JobState.SUBMITTING)
    for chunk in range(6):
        eventually(lambda: broker.jobs.status(job_id).chunks > chunk)  # noqa: B023  (it is called in this turn)
        claim(broker, job_id, chunk, str(chunk))
        assert complete(broker, job_id, chunk, str(chunk), rows=1) == "ok"
    producer.join(PATIENCE_S)
    low.close()
    assert [job.id for job in jobs] == [job_id]
    assert seen[-1][0] == 6
    assert broker.jobs.status(job_id).state is JobState.COMPLETED


def test_a_redis_that_is_too_old_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    Broker.shared(settings).close()  # else what is known of the server counts for a while
    monkeypatch.setattr("embedctl.store.connection.OLDEST_REDIS", (99, 0))
    with pytest.raises(BrokerUnavailable, match=r"needs 6\.2 or newer"):
        enqueue_embeddings(["text"], settings=settings)


def test_a_producer_that_waits_for_workers_is_as_patient_as_any(
    settings: Settings, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedctl_config.patience.OUTAGE_S", 0.5)
    low = Broker.connect(settings.replace(high_water_bytes=1024))
    jobs: list[Job] = []
    texts = ["x" * 500 for _ in range(3)]
    producer = threading.Thread(
        target=lambda: jobs.append(submit(low, records_of(texts, max_bytes=10_000), SubmitOptions(chunk_size=1)))
    )
    producer.start()
    eventually(lambda: [broker.jobs.status(each).chunks for each in broker.upkeep.active_jobs()] == [2])
    (job_id,) = broker.upkeep.active_jobs()
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
        assert complete(broker, job_id, chunk, str(chunk), rows=1) == "ok"
    producer.join(PATIENCE_S)
    low.close()
    assert [job.id for job in jobs] == [job_id]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"idempotency_key": ""}, "idempotency_key is empty"),
        ({"idempotency_key": 7}, "idempotency_key is a number, not a string"),
        ({"prompt": ["a"]}, "prompt is a list, not a string"),
        ({"chunk_size": 2.5}, "chunk_size 2.5 is not a whole number"),
        ({"chunk_size": "2"}, "chunk_size '2' is not a whole number"),
        ({"chunk_size": True}, "chunk_size True is not a whole number"),
        ({"dimensions": True}, "dimensions True is not a whole number"),
        ({"ttl": "60"}, "ttl '60' is not between"),
        ({"ttl": True}, "ttl True is not between"),
        ({"max_errors": 2.5}, "max_errors 2.5 is neither"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_before_a_job_is_made(
    arguments: dict[str, Any], message: str, settings: Settings, broker: Broker
) -> None:
    with pytest.raises(SettingsError, match=message):
        enqueue_embeddings(TEXTS, settings=settings, **arguments)
    assert not list(broker.jobs.newest())


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
    monkeypatch.setattr("embedctl_config.patience.OUTAGE_S", 0.2)
    submitting = Broker.connect(settings)

    def away(*_: object, **__: object) -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(submitting.jobs, "add", away)
    with pytest.raises(BrokerUnavailable, match="--resume"):
        submit(submitting, records_of(TEXTS, max_bytes=100), SubmitOptions())
    (job,) = broker.jobs.newest()
    assert job.state is JobState.SUBMITTING
    submitting.close()
