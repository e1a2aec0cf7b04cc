"""Records that crash, hang, exhaust or confuse a worker. Each such record fails alone."""

from __future__ import annotations

import numpy as np
import pytest

from embedctl import JobState, enqueue_embeddings
from embedctl.broker import Broker
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, deaths, kept_alive

POISON = {
    137: ("a crash-tokenizer here", "crashed_worker"),
    933: ("a crash-encoder here", "crashed_worker"),
    1133: ("it will fail-encoder", "encode_error"),
    1300: ("it will fail-tokenizer", "encode_error"),
    1507: ("this is out-of-memory alone", "out_of_memory"),
    1691: ("this is not-a-number at all", "non_finite"),
    1999: ("", "empty"),
}


@pytest.mark.slow
def test_two_thousand_records_with_seven_bad_ones(
    settings: Settings, embedctl: RunEmbedctl, start_worker: StartWorker
) -> None:
    texts = [f"text {i} of many" for i in range(2000)]
    for at, (text, _) in POISON.items():
        texts[at] = text
    with kept_alive(start_worker, 2) as workers:
        job = enqueue_embeddings(texts, ids=range(2000), hardware="poison", chunk_size=100, settings=settings)
        status = job.wait(timeout=120)
        assert (status.state, status.done, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 1993, 7)
        assert [(e.position, e.id, e.code) for e in job.errors()] == [
            (at, str(at), code) for at, (_, code) in POISON.items()
        ]
        assert (
            deaths(workers) == [-11] * 4
        )  # two a crasher: one that makes the chunk suspect, one that names the record
        good = [at for at in range(2000) if at not in POISON]
        np.testing.assert_array_equal(job.vectors()[good], reference([texts[at] for at in good]))

        assert "7 records queued again" in embedctl("retry", job.id).stderr
        status = job.wait(timeout=120)
        assert (status.done, status.failed) == (1993, 7)
        assert [e.code for e in job.errors()] == [code for _, code in POISON.values()]


def test_a_chunk_prepared_behind_a_poison_chunk_is_not_blamed(settings: Settings, start_worker: StartWorker) -> None:
    texts = [f"text {i}" for i in range(20)]
    texts[3] += " crash-encoder"
    with kept_alive(start_worker, 1) as workers:
        job = enqueue_embeddings(texts, hardware="poison", chunk_size=10, settings=settings)
        status = job.wait(timeout=60)
        assert (status.done, status.failed) == (19, 1)
        assert [e.position for e in job.errors()] == [3]
        assert len(deaths(workers)) == 2


@pytest.mark.slow
def test_a_hung_record_is_named_after_two_ends_by_the_watch(
    settings: Settings, environment: dict[str, str], start_worker: StartWorker
) -> None:
    environment["EMBEDCTL_HANG_S"] = "1.5"
    texts = [f"text {i}" for i in range(10)]
    texts[4] += " hang-encoder"
    with kept_alive(start_worker, 1) as workers:
        job = enqueue_embeddings(texts, hardware="poison", settings=settings)
        status = job.wait(timeout=60)
        assert (status.done, status.failed) == (9, 1)
        assert [(e.position, e.code) for e in job.errors()] == [(4, "crashed_worker")]
        assert deaths(workers) == [70, 70]


def test_a_record_that_costs_the_device_is_named_after_two_ends(settings: Settings, start_worker: StartWorker) -> None:
    texts = [f"text {i}" for i in range(20)]
    texts[14] += " lose-device"
    with kept_alive(start_worker, 1) as workers:
        job = enqueue_embeddings(texts, hardware="poison", chunk_size=10, settings=settings)
        status = job.wait(timeout=60)
        assert (status.done, status.failed) == (19, 1)
        assert [(e.position, e.code) for e in job.errors()] == [(14, "crashed_worker")]
        assert deaths(workers) == [71, 71]
        assert "makes this backend lose its device: ending this process" in workers[0].log()


def test_a_batch_too_large_for_the_memory_is_split_and_the_limit_remembered(
    settings: Settings, start_worker: StartWorker
) -> None:
    worker = start_worker("small")
    texts = [f"text {i} " + "word " * 10 for i in range(200)]
    job = enqueue_embeddings(texts, hardware="small", chunk_size=50, settings=settings)
    status = job.wait(timeout=60)
    assert (status.done, status.failed) == (200, 0)
    assert worker.log().count("memory is too small") <= 6  # it is learned once, not for each batch


@pytest.mark.slow
def test_a_suspect_chunk_is_shown_with_its_history(
    settings: Settings, embedctl: RunEmbedctl, broker: Broker, start_worker: StartWorker
) -> None:
    first = start_worker("slow")
    job = enqueue_embeddings([f"text {i} " + "word " * 60 for i in range(40)], hardware="slow", settings=settings)
    eventually(lambda: first.row().holding)
    name = first.row().name
    first.kill()
    second = start_worker("slow")
    eventually(lambda: broker.jobs.suspects(job.id))
    shown = embedctl("status", job.id).stdout
    assert "suspect" in shown
    assert name in shown
    assert job.wait(timeout=60).done == 40
    assert "encoding it alone" in second.log()
