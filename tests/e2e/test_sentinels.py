"""Sentinels name another master. Producers, workers and waiting readers go on there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedctl import Job, JobNotFound, JobState, enqueue_embeddings
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.jobs import assert_encoded
from tests.support.processes import RunEmbedctl
from tests.support.sentinels import Site
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.workers import StartWorker

WITH_A_PASSWORD = pytest.mark.parametrize("site", ["hunter2"], ids=["password"], indirect=True)
TEXTS = [f"text {row} " + "word " * 60 for row in range(50)]


@pytest.fixture
def site(short_folder: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Its sentinels ask for the fixture's parameter as a password, if it has one."""
    made = Site(short_folder, password=getattr(request, "param", ""))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def environment(environment: dict[str, str], site: Site, tmp_path: Path) -> dict[str, str]:
    own = {**environment, "EMBEDCTL_REDIS_URL": site.url}
    if site.password:
        file = tmp_path / "sentinels"
        file.write_text(f"{site.password}\n")
        own["EMBEDCTL_SENTINEL_PASSWORD_FILE"] = str(file)
    return own


@pytest.fixture
def job(settings: Settings, start_worker: StartWorker) -> Job:
    """A job that has begun, and takes some seconds more."""
    start_worker("slow")
    job = enqueue_embeddings(TEXTS, hardware="slow", chunk_size=2, settings=settings)
    eventually(lambda: job.status().chunks_done > 2)
    return job


@WITH_A_PASSWORD
def test_doctor_names_master_and_sentinels_that_refuse_us(site: Site, embedctl: RunEmbedctl, tmp_path: Path) -> None:
    said = embedctl("doctor").stdout
    assert f"3 of 3 sentinels answer; 127.0.0.1:{site.master.port} is the master, with 1 replica" in said, said
    wrong = tmp_path / "wrong"
    wrong.write_text("hunter3\n")
    for file in ("", str(wrong)):
        own = {"EMBEDCTL_SENTINEL_PASSWORD_FILE": file}
        said = embedctl("doctor", **own).stdout
        assert "0 of 3 sentinels answer, and 3 refuse the password, or ask for one" in said, said
        failed = embedctl("list", **own, status=69)
        assert "refuse the password, or ask for one: set sentinel_password_file" in failed.stderr
        assert "hunter" not in said + failed.stdout + failed.stderr


@pytest.mark.slow
@WITH_A_PASSWORD
def test_a_job_goes_on_after_its_master_was_killed(site: Site, job: Job) -> None:
    old = site.master
    states: list[JobState] = []
    waiting = threading.Thread(target=lambda: states.append(job.wait(timeout=120).state), daemon=True)
    waiting.start()
    old.kill()
    site.wait_for_failover(old)
    assert_encoded(job, TEXTS)
    waiting.join(PATIENCE_S)
    assert states == [JobState.COMPLETED]
    old.server.start()  # the sentinels make it a replica of the new master
    eventually(lambda: old.replication().get("master_link_status") == "up")


@pytest.mark.slow
def test_a_master_that_comes_back_as_a_replica_is_left(site: Site, job: Job, settings: Settings) -> None:
    old = site.master
    old.send_signal(signal.SIGSTOP)
    site.wait_for_failover(old)
    old.send_signal(signal.SIGCONT)  # connections to it are still open
    assert_encoded(job, TEXTS)
    eventually(lambda: old.replication().get("role") == "slave")
    later = enqueue_embeddings(TEXTS, hardware="slow", chunk_size=20, settings=settings)
    assert_encoded(later, TEXTS)


@pytest.mark.slow
def test_what_a_replica_did_not_receive_is_encoded_again_or_named(site: Site, job: Job, settings: Settings) -> None:
    old = site.master
    site.part()
    done = job.status().chunks_done
    eventually(lambda: job.status().chunks_done > done + 2)
    forgotten = enqueue_embeddings(TEXTS, hardware="slow", settings=settings)
    old.kill()
    site.wait_for_failover(old)
    assert not site.master.client.exists(keys.job(forgotten.id))
    with pytest.raises(JobNotFound, match="made by this process, and Redis no longer knows it"):
        forgotten.wait(timeout=60)
    assert_encoded(job, TEXTS)
