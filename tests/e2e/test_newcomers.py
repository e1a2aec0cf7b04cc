"""The library in the hands of somebody who has just read the README."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from embedctl import AsyncJob, InputError, JobFailed, JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.workers import StartWorker

START = "No live worker serves dummy on dummy. Start one: embedctl worker --class dummy --model dummy"
WITHOUT_A_WORKER = """
import asyncio
from embedctl import AsyncJob, Job, JobUnfinished, WaitTimeout, enqueue_embeddings

async def read(results):
    async for _ in results: pass

job_id = enqueue_embeddings(["first text", "second text"]).id
for call in (
    lambda job: job.wait(timeout=0.1),
    lambda job: list(job.iter_results(timeout=0.1)),
    lambda job: asyncio.run(AsyncJob(job).wait(timeout=0.1)),
    lambda job: asyncio.run(read(AsyncJob(job).iter_results(timeout=0.1))),
    lambda job: job.vectors(),
):
    try:
        call(Job.get(job_id))
    except (JobUnfinished, WaitTimeout) as error:
        print(error)
"""


def test_without_a_worker_a_program_says_so_at_once(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_WORKER], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [START] * 4  # Python prints warnings if logging was not configured
    errors = done.stdout.splitlines()
    assert len(errors) == 5
    for error in errors:
        assert re.search(r"job \S+ is queued.*: 0 of 2 records are done", error)
        assert error.endswith(START)


def test_vectors_of_a_job_without_any_raise(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()
    texts: list[Any] = [None, "", None]
    job = enqueue_embeddings(texts, ids=["a", "b", "c"], chunk_size=1, settings=settings)
    assert job.wait(timeout=60).state is JobState.FAILED
    with pytest.raises(JobFailed) as failed:
        job.vectors()
    assert str(failed.value) == (
        f"every record of job {job.id} failed, so there are no vectors. Record 0: the text field holds null, "
        f"not text (not_text). `embedctl errors {job.id}` lists them"
    )
    assert enqueue_embeddings([], settings=settings).vectors().shape == (0, 0)
    with pytest.raises(JobFailed, match="every record"):
        asyncio.run(AsyncJob(job).vectors())
    assert [len(chunk.errors) for chunk in job.iter_results()] == [1, 1, 1]
    assert len(job.errors()) == 3


def test_the_fields_of_mappings_are_named(settings: Settings, start_worker: StartWorker) -> None:
    start_worker()
    rows = [{"body": "one", "key": 7}]
    with pytest.raises(InputError, match=r"text_field= in Python"):
        enqueue_embeddings(rows, settings=settings)
    job = enqueue_embeddings(rows, text_field="body", id_field="key", settings=settings)
    job.wait(timeout=60)
    assert [chunk.ids for chunk in job.iter_results()] == [["7"]]
    np.testing.assert_array_equal(job.vectors(), reference(["one"]))
