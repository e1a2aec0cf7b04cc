"""A worker that falls sick: what goes wrong blames no record."""

from __future__ import annotations

from embedctl import enqueue_embeddings
from tests.support.here import Here
from tests.support.jobs import assert_encoded
from tests.support.limits import settings_of
from tests.support.sick_backends import register
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
    assert_encoded(job, TEXTS)
    assert sick.process.wait(60) == 71
    assert "Traceback" not in sick.log()
    assert sick.log().count("ending this process") == 1
    assert (job.status().deaths, job.status().lapsed) == (0, 0)
    trouble = job.status().trouble or ""
    assert "@" in trouble
    assert "can't encode a text of its own: the backend failed: MemoryError: the host has no memory left" in trouble
    assert well.process.poll() is None
