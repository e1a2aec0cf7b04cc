"""A job that is one chunk by the settings alone, and several workers that could share it."""

from __future__ import annotations

import numpy as np

from embedctl import Job
from tests.support.here import Here
from tests.support.jobs import reference

#: 32 batches of the class `slow`, of 0.1 s each. A worker that has not measured its rate gets at least 8 KiB.
TEXTS = [f"{number:02} " + f"{'x' * 25} " * 42 for number in range(32)]


def test_two_workers_share_a_small_file(here: Here) -> None:
    both = [here.start_worker("slow"), here.start_worker("slow")]
    (here.folder / "corpus.txt").write_text("\n".join(TEXTS) + "\n")
    estimated = here.embedctl("submit", "corpus.txt", "--class", "slow", "--dry-run")
    assert "chunks     4, of at most 512 records and" in estimated.stdout
    submitted = here.embedctl("submit", "corpus.txt", "--class", "slow", "--wait", "--resume", "k")
    job_id = submitted.stdout.split()[0]
    job = Job.get(job_id, here.settings)
    assert job.status().chunks == 4
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))
    assert all(job_id in worker.log() for worker in both)
    both[0].stop()
    again = here.embedctl("submit", "corpus.txt", "--class", "slow", "--resume", "k")
    assert (again.returncode, again.stdout.split()[0]) == (0, job_id)
