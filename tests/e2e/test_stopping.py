"""`embedctl stop`, with a worker that encodes meanwhile."""

from __future__ import annotations

import json

import numpy as np
import pytest

from embedctl import Job
from embedctl_config import keys
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.waiting import eventually

TEXTS = [f"text {at} " + "word " * 60 for at in range(60)]


@pytest.mark.slow
def test_a_stopped_job_keeps_its_vectors_and_resumes_with_its_corpus(here: Here) -> None:
    here.start_worker("slow")
    (here.folder / "c.txt").write_text("\n".join(TEXTS) + "\n")
    job_id = here.embedctl("submit", "c.txt", "--class", "slow", "--chunk-size", "2").stdout.strip()
    job = Job.get(job_id, here.settings)
    eventually(lambda: job.status().chunks_done >= 2)

    stopped = here.embedctl("stop", job_id, "--json", status=0)
    (facts,) = json.loads(stopped.stdout)
    assert (facts["state"], facts["records"]) == ("stopped", 60)
    assert 0 < facts["done"] < 60
    assert "stopped" in here.embedctl("status", job_id).stdout
    eventually(lambda: not here.raw.zcard(keys.ACTIVE))
    assert not list(here.raw.scan_iter(f"embed:job:{job_id}:in:*"))

    fetched = here.embedctl("fetch", job_id, "-o", "part.npy", status=1)
    assert f"{60 - facts['done']} records were not encoded: the job was stopped" in fetched.stderr
    expected, part = reference(TEXTS), np.load(here.folder / "part.npy")
    there = ~np.isnan(part).any(axis=1)
    assert there.sum() == facts["done"]
    np.testing.assert_array_equal(part[there], expected[there])

    here.embedctl("submit", "c.txt", "--resume", job_id, "-o", "whole.npy", status=0)
    np.testing.assert_array_equal(np.load(here.folder / "whole.npy"), expected)
    status = job.status()
    assert (status.done, status.chunks_done, status.waiting_bytes) == (60, 30, 0)
    assert here.embedctl("stop", job_id).returncode == 0
    assert job.status().state == "completed"
