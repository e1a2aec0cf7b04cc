"""Submit, encode, store, fetch: through a real Redis and a worker process, without a model; and for newcomers."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl import AsyncJob, JobFailed, JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.waiting import eventually
from tests.support.workers import StartWorker


def test_vectors_come_back_in_input_order_with_ids_and_errors(here: Here) -> None:
    here.start_worker()
    texts = [f"text number {i} {'word ' * (i % 50)}" for i in range(3000)]
    items: list[dict[str, object]] = [{"text": text, "id": f"id-{i}"} for i, text in enumerate(texts)]
    bad = {7: None, 600: "  ", 2999: "\ud800"}
    for at, text in bad.items():
        items[at]["text"] = text

    job = enqueue_embeddings(iter(items), settings=here.settings)
    status = job.wait(timeout=60)

    assert status.state is JobState.COMPLETED_WITH_ERRORS
    assert (status.records, status.done, status.failed) == (3000, 2997, 3)
    vectors = job.vectors()
    assert vectors.shape == (3000, 16)
    assert vectors.dtype == np.float32
    good = [i for i in range(3000) if i not in bad]
    np.testing.assert_array_equal(vectors[good], reference([texts[i] for i in good]))
    assert np.isnan(vectors[list(bad)]).all()
    assert [(e.position, e.id, e.code) for e in job.errors()] == [
        (7, "id-7", "not_text"),
        (600, "id-600", "empty"),
        (2999, "id-2999", "invalid_utf8"),
    ]
    assert [label for chunk in job.iter_results() for label in chunk.ids] == [f"id-{i}" for i in range(3000)]


def test_options_reach_the_worker(here: Here) -> None:
    here.start_worker()
    long = "word " * 300
    prompted = enqueue_embeddings(["a b"], prompt="query: ", settings=here.settings)
    strict = enqueue_embeddings(["a b", long], long="error", settings=here.settings)
    cut = enqueue_embeddings(["a b", long], settings=here.settings)
    raw = enqueue_embeddings(["a b"], normalize=False, settings=here.settings)
    mean = enqueue_embeddings(["a b", long], long="mean", settings=here.settings)
    short = enqueue_embeddings(["a b", ""], dimensions=5, settings=here.settings)
    for job in (prompted, strict, cut, raw, mean, short):
        job.wait(timeout=60)
    np.testing.assert_array_equal(prompted.vectors(), reference(["a b"], "query: "))
    assert [(e.position, e.code) for e in strict.errors()] == [(1, "too_long")]
    assert [(t.position, t.used, t.lost) for c in cut.iter_results() for t in c.truncations] == [(1, 256, 44)]
    assert cut.status().truncated == 1
    assert abs(float(np.linalg.norm(raw.vectors())) - 1) > 0.01
    assert mean.status().truncated == 0
    assert mean.status().tokens == 302
    np.testing.assert_allclose(mean.vectors()[0], reference(["a b"])[0], rtol=0, atol=1e-7)
    assert not np.allclose(mean.vectors()[1], cut.vectors()[1], atol=1e-3)
    assert (short.status().dim, short.vectors().shape) == (5, (2, 5))
    expected = reference(["a b"])[0, :5]
    np.testing.assert_allclose(short.vectors()[0], expected / np.linalg.norm(expected), rtol=0, atol=1e-6)


def test_standard_input_partial_failure_and_exit_codes(here: Here) -> None:
    here.start_worker()
    here.embedctl("submit", "-", "--format", "txt", "-o", "out.npy", stdin="one\n\nthree\n", status=3)
    assert np.isnan(np.load(here.folder / "out.npy")).all(axis=1).tolist() == [False, True, False]
    [error] = [json.loads(line) for line in (here.folder / "out.errors.jsonl").read_text().splitlines()]
    assert (error["position"], error["code"]) == (1, "empty")

    here.embedctl("submit", "-", "--wait", "--format", "txt", stdin="\n", status=1)
    here.embedctl("status", "20200101-000000-0000000000", status=4)
    here.embedctl("submit", "missing.jsonl", status=2)
    down = here.embedctl("status", "x", EMBEDCTL_REDIS_URL=f"unix://{here.folder}/nothing.sock", status=69)
    assert "can't be reached" in down.stderr
    assert "Traceback" not in down.stderr


def test_run_starts_everything_it_needs_and_leaves_nothing(here: Here) -> None:
    (here.folder / "corpus.txt").write_text("one\ntwo\nthree\n")
    options = ["-o", "out.npy", "--class", "dummy", "--model", "dummy", "--json"]
    ran = here.embedctl("run", "corpus.txt", *options, EMBEDCTL_REDIS_URL="", status=0)
    facts = json.loads(ran.stdout)
    files = ["out.npy", "out.digests.bin", "out.about.json"]
    assert (facts["vectors"], facts["dim"], facts["files"]) == (3, 16, files)
    np.testing.assert_array_equal(np.load(here.folder / "out.npy"), reference(["one", "two", "three"]))
    eventually(lambda: not _processes_naming(str(here.folder)))


def _processes_naming(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            known = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in known:
            found.append(int(folder.name))
    return found


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
