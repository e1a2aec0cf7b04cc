"""A fetch that Redis leaves in the middle is an outage, and what was read of a job that is gone may be all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner
from redis import Redis

from embedctl.cli import main
from embedctl.cli import run as run_module
from embedctl.cli.destination import Destination
from embedctl.destinations.files import fetch
from embedctl.destinations.loop import Callbacks
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.store import Added
from embedctl.waiting import waiter
from embedctl.waiting.results import ChunkVectors
from embedctl_config import keys
from embedctl_config.errors import BrokerUnavailable, JobError, JobFailed, JobLost, JobNotFound, JobStalled, OutputError
from embedctl_config.settings import Settings
from tests.support.store import DIM, add, new_job, work


def at_results(broker: Broker, monkeypatch: pytest.MonkeyPatch, happens: Callable[[int], object]) -> list[int]:
    """The chunks whose results are read from here on, in order; something happens before each is."""
    asked: list[int] = []
    result = broker.jobs.result

    def noted(job_id: str, chunk: int) -> bytes | None:
        asked.append(chunk)
        happens(chunk)
        return result(job_id, chunk)

    monkeypatch.setattr(broker.jobs, "result", noted)
    return asked


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.jsonl"])
def test_the_next_fetch_is_whole(name: str, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = new_job(broker, 3)
    work(broker, job_id, 0, 1, 2)
    away = [True]

    def leave(chunk: int) -> None:
        if chunk == 2 and away:
            raise BrokerUnavailable("Redis went away")

    at_results(broker, monkeypatch, leave)
    monkeypatch.setattr("embedctl_config.retry.RETRY_S", -1.0)
    with pytest.raises(BrokerUnavailable, match="went away"):
        fetch(Job(job_id, broker), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    away.clear()
    fetch(Job(job_id, broker), tmp_path / name)
    if name.endswith("npy"):
        assert np.load(tmp_path / name).shape == (6, DIM)
    else:
        assert len((tmp_path / name).read_text().splitlines()) == 6
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.jsonl"])
def test_parts_of_lost_jobs_stay(name: str, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = new_job(broker, 3)
    work(broker, job_id, 0, 1)
    job, path = Job(job_id, broker), tmp_path / name

    def discard(chunk: int) -> None:
        if chunk == 2:
            job.discard()

    at_results(broker, monkeypatch, discard)
    with pytest.raises(JobNotFound, match=r"The 2 chunks fetched so far stay in .*part") as raised:
        fetch(job, path)
    kept = tmp_path / f".{name}.{job_id}.part"
    assert str(kept) in str(raised.value)
    part = kept.read_bytes()
    assert len(part) >= 4 * DIM * 4
    with pytest.raises(JobNotFound):  # another try does no harm to it
        fetch(job, path)
    other = new_job(broker, 1)
    work(broker, other, 0)
    fetch(Job(other, broker), path)  # nor does another job
    assert kept.read_bytes() == part


def test_what_was_read_of_a_job_whose_producer_died_is_resumed_once_that_is_submitted(
    broker: Broker, raw: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "PRODUCER_LEASE_S", 1)
    job_id, path = new_job(broker, 2, seal=False), tmp_path / "vectors.jsonl"
    work(broker, job_id, 0, 1)
    raw.delete(keys.producer(job_id))
    with pytest.raises(JobStalled, match=r"--resume .* The 2 chunks fetched so far stay in .*part"):
        fetch(Job(job_id, broker), path)
    assert add(broker, job_id, 2, token="next")[0] is Added.OK
    broker.jobs.seal(job_id, 3)
    work(broker, job_id, 2)
    fetch(Job(job_id, broker), path)
    assert len(path.read_text().splitlines()) == 6


@pytest.mark.parametrize(("error", "stays"), [(JobLost("lost: repair it."), True), (JobFailed("spent"), False)])
def test_a_run_keeps_a_job_that_the_same_command_repairs(
    error: JobError, stays: bool, settings: Settings, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def no_worker(*_: object, **__: object) -> Iterator[object]:
        yield settings, lambda: None, ""

    monkeypatch.setattr(run_module, "_stack", no_worker)
    monkeypatch.setattr(Destination, "save", Mock(side_effect=error))
    monkeypatch.setattr(run_module, "load_settings", lambda: settings)
    (tmp_path / "corpus.txt").write_text("a\nb\n")
    found = CliRunner().invoke(main, ["run", str(tmp_path / "corpus.txt"), "-o", str(tmp_path / "out.npy"), "-q"])
    assert found.exit_code == error.exit_code, found.output
    assert bool(list(broker.jobs.newest())) is stays
    assert ("The same command does that" in found.output) is stays


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.jsonl", "vectors.parquet"])
@pytest.mark.parametrize("planted", [".{}.part", ".{}.lock", ".vectors.ids.jsonl.part"])
def test_a_link_that_somebody_planted_leads_nowhere(name: str, planted: str, broker: Broker, tmp_path: Path) -> None:
    job_id = new_job(broker, 1)
    work(broker, job_id, 0)
    theirs = tmp_path / "precious"
    theirs.write_text("precious")
    (tmp_path / planted.format(name)).symlink_to(theirs)
    with suppress(OutputError):
        fetch(Job(job_id, broker), tmp_path / name)
    assert theirs.read_text() == "precious"


def test_a_fetch_sees_the_job_go_on(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiter, "LOOK_EVERY_S", -1.0)
    job_id = new_job(broker, 3)
    work(broker, job_id, 0, 1)
    seen: list[tuple[int, str]] = []
    written: list[int] = []

    def notes(chunk: ChunkVectors) -> None:
        written.append(int(chunk.positions[-1]) + 1)
        if len(written) == 1:
            work(broker, job_id, 2)

    job = Job(job_id, broker)
    told = Callbacks(lambda status: seen.append((status.done, status.state)), notes)
    fetch(job, tmp_path / "vectors.jsonl", told)
    assert seen == [(4, "running"), (6, "completed")]
    assert written == [2, 4, 6]
