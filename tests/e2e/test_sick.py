"""Workers that lose the ability to encode after their start. They leave, and no record is blamed."""

from __future__ import annotations

import numpy as np

from embedctl import JobState, enqueue_embeddings
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.limits import settings_of
from tests.support.sick_backends import register
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess

TEXTS = [f"text {i} of many" for i in range(4000)]


def test_a_worker_that_falls_sick_leaves_and_the_others_encode_every_record(here: Here) -> None:
    config = here.folder / "embedctl.toml"
    common = config.read_text()

    def start(backend: str, option: str) -> WorkerProcess:
        config.write_text(f'{common}\n[classes.mixed]\nbackend = "{backend}"\noptions = {{dim = 16, {option}}}\n')
        return here.start_worker("mixed", prepare=register)

    here.environment["EMBEDCTL_LEASE_S"] = "10"  # no lease is to lapse, however busy the machine is
    sick, well = start("fading", "batches = 8"), start("dummy", "seconds_per_batch = 0.02")
    job = enqueue_embeddings(TEXTS, hardware="mixed", chunk_size=100, settings=settings_of(here.environment))
    status = job.wait(timeout=120)
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED, 4000, 0)
    assert sick.process.wait(60) == 71
    assert "Traceback" not in sick.log()
    assert sick.log().count("ending this process") == 1
    assert (status.deaths, status.lapsed) == (0, 0)
    trouble = job.status().trouble or ""
    assert "@" in trouble
    assert "can't encode a text of its own: the backend failed: MemoryError: the host has no memory left" in trouble
    assert well.process.poll() is None
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_bad_record_does_not_wait_for_a_worker_that_is_busy(here: Here) -> None:
    """With the default times of users: a ticket is sent again only later than the wait here."""
    config = here.folder / "embedctl.toml"
    config.write_text(config.read_text().replace("lease_s = 1.0\n", "hang_s = 1000\n"))
    del here.environment["LIMIT_REISSUE_S"]
    settings = settings_of(here.environment)
    assert settings.limits.reissue_s == 60
    busy = here.start_worker("poison")
    long = [  # with other options each: they share no batch, so each keeps a thread busy
        enqueue_embeddings([f"{at} hang-encoder"], normalize=bool(at), hardware="poison", settings=settings)
        for at in range(2)
    ]
    eventually(lambda: all(job.status().claims for job in long))
    here.start_worker("poison")
    job = enqueue_embeddings(["a", "b fail-encoder", "c"], hardware="poison", settings=settings)
    status = job.wait(timeout=50)  # less than reissue_s
    assert (status.done, status.failed) == (2, 1)
    busy.process.kill()
