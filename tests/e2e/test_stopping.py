"""`embedctl stop`, with a worker that encodes meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import redis as redis_py

from embedctl import Job
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

TEXTS = [f"text {at} " + "word " * 60 for at in range(60)]


@pytest.mark.slow
def test_a_stopped_job_keeps_its_vectors_and_resumes_with_its_corpus(
    settings: Settings, embedctl: RunEmbedctl, raw: redis_py.Redis, start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker("slow")
    (short_folder / "c.txt").write_text("\n".join(TEXTS) + "\n")
    job_id = embedctl("submit", "c.txt", "--class", "slow", "--chunk-size", "2").stdout.strip()
    job = Job.get(job_id, settings)
    eventually(lambda: job.status().chunks_done >= 2)

    stopped = embedctl("stop", job_id, "--json")
    assert stopped.returncode == 0, stopped.stderr
    (facts,) = json.loads(stopped.stdout)
    assert (facts["state"], facts["records"]) == ("stopped", 60)
    assert 0 < facts["done"] < 60
    assert "stopped" in embedctl("status", job_id).stdout
    eventually(lambda: not raw.zcard(keys.ACTIVE))
    assert not list(raw.scan_iter(f"embed:job:{job_id}:in:*"))

    fetched = embedctl("fetch", job_id, "-o", "part.npy")
    assert fetched.returncode == 1
    assert f"{60 - facts['done']} records were not encoded: the job was stopped" in fetched.stderr
    expected, part = reference(TEXTS), np.load(short_folder / "part.npy")
    there = ~np.isnan(part).any(axis=1)
    assert there.sum() == facts["done"]
    np.testing.assert_array_equal(part[there], expected[there])

    resumed = embedctl("submit", "c.txt", "--resume", job_id, "-o", "whole.npy")
    assert resumed.returncode == 0, resumed.stderr
    np.testing.assert_array_equal(np.load(short_folder / "whole.npy"), expected)
    status = job.status()
    assert (status.done, status.chunks_done, status.waiting_bytes) == (60, 30, 0)
    assert embedctl("stop", job_id).returncode == 0
    assert job.status().state == "completed"
