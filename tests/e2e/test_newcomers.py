"""The library in the hands of somebody who has just read the README."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embedctl import AsyncJob, InputError, JobFailed, JobState, aenqueue_embeddings, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.enqueue import JobOptions, submit
from embedctl.records import make_record
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.workers import StartWorker

START = "No live worker serves dummy on dummy. Start one: embedctl worker --class dummy --model dummy"
PAIRS = [("a", "one"), ("b", "two")]

WITHOUT_A_WORKER = """
import asyncio, sys
from embedctl import AsyncJob, JobUnfinished, WaitTimeout, enqueue_embeddings
job = enqueue_embeddings(["first text", "second text"])

async def read():
    same = AsyncJob(job)
    try:
        if sys.argv[1] == "aio.wait":
            await same.wait(timeout=0.2)
        async for _ in same.iter_results(timeout=0.2): pass
    except WaitTimeout as error: print(error)

try:
    if sys.argv[1] == "vectors": job.vectors()
    elif sys.argv[1] == "wait": job.wait(timeout=0.2)
    elif sys.argv[1] == "iter_results": list(job.iter_results(timeout=0.2))
    else: asyncio.run(read())
except (JobUnfinished, WaitTimeout) as error: print(error)
"""


@pytest.mark.parametrize("call", ["wait", "iter_results", "aio.wait", "aio.iter_results", "vectors"])
def test_without_a_worker_a_program_says_so_at_once(call: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_WORKER, call], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"job \S+ is queued.*: 0 of 2 records are done", done.stdout)
    assert START in done.stdout
    if call != "vectors":  # which does not wait
        assert done.stderr.splitlines() == [START]


def test_vectors_of_a_job_without_any_raise(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()
    job = enqueue_embeddings([None, "", None], ids=["a", "b", "c"], chunk_size=1, settings=settings)
    assert job.wait(timeout=60).state is JobState.FAILED
    with pytest.raises(JobFailed) as failed:
        job.vectors()
    assert str(failed.value) == (
        f"each of the 3 records of job {job.id} failed, so there are no vectors. Record 0: the text field holds null, "
        f"not text (not_text). `embedctl errors {job.id}` lists them"
    )
    with pytest.raises(JobFailed, match="each of the 3 records"):
        asyncio.run(AsyncJob(job).vectors())
    assert [len(chunk.errors) for chunk in job.iter_results()] == [1, 1, 1]
    assert len(job.errors()) == 3


def test_vectors_of_a_job_with_some_do_not_raise(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()
    job = enqueue_embeddings([None, "a text"], chunk_size=1, settings=settings)
    job.wait(timeout=60)
    np.testing.assert_array_equal(np.isnan(job.vectors()).all(1), [True, False])


def test_the_fields_of_mappings_are_named(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()
    rows = [{"body": "one", "key": 7}]
    with pytest.raises(InputError, match=r"text_field= in Python"):
        enqueue_embeddings(rows, settings=settings)
    job = enqueue_embeddings(rows, text_field="body", id_field="key", settings=settings)
    same = asyncio.run(aenqueue_embeddings(rows, text_field="body", id_field="key", settings=settings))
    job.wait(timeout=60)
    assert [chunk.ids for chunk in job.iter_results()] == [["7"]]
    asyncio.run(same.wait(timeout=60))
    np.testing.assert_array_equal(asyncio.run(same.vectors()), reference(["one"]))


def test_pairs_are_refused_and_leave_no_job_behind_that_goes_on(settings: Settings, broker: Broker) -> None:
    for name, texts in (("tuple", PAIRS), ("int", [1, 2])):
        with pytest.raises(InputError, match=f"record 0 is of type {name}, not a text: give texts="):
            enqueue_embeddings(texts, settings=settings)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"record 0 is of type {name}, not a text: give texts="):
            asyncio.run(aenqueue_embeddings(texts, settings=settings))  # type: ignore[arg-type]
    assert {job.state for job in broker.jobs.newest()} == {JobState.CANCELLED}


@pytest.mark.parametrize("items", [[("a", "one"), "two", 7, ["three"]], [7, "two", None, "four"]])
def test_a_job_of_an_older_version_with_items_of_any_kind_goes_on(
    items: list[object], settings: Settings, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker()
    options = JobOptions(idempotency_key="k", chunk_size=2)

    def dies_half_way():  # type: ignore[no-untyped-def]
        yield from (make_record(item, None, 1000) for item in items[:2])
        yield make_record("never stored", None, 1000)
        raise KeyboardInterrupt

    broker = Broker.connect(settings)
    with pytest.raises(KeyboardInterrupt):
        submit(broker, dies_half_way(), options)
    job = enqueue_embeddings(items, idempotency_key="k", chunk_size=2, settings=settings)  # type: ignore[arg-type]
    status = job.wait(timeout=60)
    wrong = [at for at, item in enumerate(items) if not isinstance(item, str)]
    assert (status.records, [error.position for error in job.errors()]) == (4, wrong)
    with pytest.raises(InputError, match="record 0 is of type"):
        enqueue_embeddings(items, idempotency_key="another", settings=settings)  # type: ignore[arg-type]
    broker.close()
