"""The main job on real text with the real model: two workers on two CPU sets, against sentence-transformers."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from embedctl import JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from embedctl_workers.models.files import resolve_model
from tests.support.passages import real_passages
from tests.support.references_here import expected_vectors, keep_references
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, WorkerProcess

MODEL = "all-MiniLM-L6-v2"


def assert_pinned(worker: WorkerProcess, cpu: int) -> None:
    """Every thread of the process may run on its one CPU alone, and one of them computes."""
    for task in Path(f"/proc/{worker.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread has just ended
            lines = (task / "status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            assert status["Cpus_allowed_list"] == str(cpu)
    variables = Path(f"/proc/{worker.pid}/environ").read_bytes()
    assert b"OMP_NUM_THREADS" not in variables  # it was the worker that set it, not what started it
    assert (worker.row().cpus, worker.row().threads) == (str(cpu), 1)


def spent_ticks(worker: WorkerProcess) -> int:
    fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.timeout(400)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.slow
def test_two_pinned_workers_give_the_vectors_of_sentence_transformers(
    settings: Settings, environment: dict[str, str], start_worker: StartWorker
) -> None:
    environment["EMBEDCTL_LEASE_S"] = "30"  # two busy CPUs may keep a heartbeat waiting for more than a second
    texts = [text for text in real_passages(200) if text]
    assert len(texts) >= 185
    keep_references(resolve_model(MODEL).folder, environment["EMBEDCTL_CACHE_DIR"])
    first, second, *_ = sorted(os.sched_getaffinity(0))
    # Not forked: a fork's threads and variables are those that another process began with.
    workers = {
        cpu: start_worker("cpu", model=MODEL, cpus=str(cpu), wait=False, forked=False) for cpu in (first, second)
    }
    for worker in workers.values():
        worker.wait_ready()
    before = [spent_ticks(worker) for worker in workers.values()]

    job = enqueue_embeddings(texts, model=MODEL, hardware="auto", chunk_size=8, settings=settings)
    eventually(lambda: all(worker.row().progressed_ms for worker in workers.values()))
    for cpu, worker in workers.items():
        assert_pinned(worker, cpu)
    status = job.wait(timeout=300)

    assert status.state is JobState.COMPLETED
    assert (status.hardware, status.precision) == ("cpu", "fp32")
    assert status.done == len(texts)
    assert status.claims == status.chunks_done == status.chunks
    # Without their starts, which cost more than this job and the same for both.
    share = [spent_ticks(worker) - spent for worker, spent in zip(workers.values(), before, strict=True)]
    assert min(share) > 0.4 * max(share), f"they did not share the work: {share}"

    difference = float(np.abs(job.vectors() - expected_vectors(resolve_model(MODEL).folder, texts)).max())
    print(json.dumps({"passages": len(texts), "tokens": status.tokens, "max_abs_difference": difference}))
    assert difference <= 1e-5
    cut = [cut for chunk in job.iter_results() for cut in chunk.truncations]
    assert len(cut) >= 2
    assert all(each.used == 256 and each.lost > 0 for each in cut)
