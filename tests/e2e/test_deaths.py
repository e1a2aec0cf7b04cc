"""Workers that are killed, starved, frozen or stopped at the worst of times: every record ends exactly once."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import redis as redis_py

from embedctl import Job, JobState, JobStatus, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.reaper import Reaper
from embedctl_config.settings import Settings
from tests.support.jobs import owners, reference
from tests.support.limits import settings_of
from tests.support.sick_backends import MEGABYTES, register
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, WorkerProcess, deaths, kept_alive

TEXTS = [f"text {i} " + "word " * 60 for i in range(60)]


def submit(settings: Settings, *, records: int = 40, chunk_size: int = 10) -> Job:
    """A job of the class that takes a tenth of a second for each record."""
    return enqueue_embeddings(TEXTS[:records], hardware="slow", chunk_size=chunk_size, settings=settings)


def row_in_hand(raw: redis_py.Redis, job: Job) -> int:
    """The current row of a worker in careful mode; -1 if there is none."""
    rows = [int(owner[2]) for owner in owners(raw, job).values() if owner[2:] and owner[2]]
    return max(rows, default=-1)


def in_the_middle(raw: redis_py.Redis, job: Job, worker: WorkerProcess, chunks: int = 1) -> bool:
    """Whether a worker holds leases of this many chunks and has finished a batch since it began."""
    return len(owners(raw, job)) >= chunks and worker.row().progressed_ms > 0


def kill_in_the_middle(raw: redis_py.Redis, job: Job, worker: WorkerProcess) -> None:
    """Kill a worker that encodes one chunk and has prepared another, so that both are suspect."""
    eventually(lambda: in_the_middle(raw, job, worker, chunks=2))
    worker.kill()


def ended(job: Job) -> JobStatus:
    """The job's status once it has ended. This does not use `wait`, which also reaps: here only workers reap."""
    eventually(lambda: job.status().state.ended)
    return job.status()


def assert_every_record_has_its_vector(job: Job, records: int = 40) -> None:
    status, texts = ended(job), TEXTS[:records]
    assert (status.state, status.records, status.done) == (JobState.COMPLETED, len(texts), len(texts))
    assert job.errors() == []
    assert job.suspects() == []
    np.testing.assert_array_equal(job.vectors(), reference(texts))


def test_a_worker_that_crashes_in_the_middle_of_a_chunk(
    settings: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    doomed = start_worker("slow")
    job = submit(settings)
    eventually(lambda: in_the_middle(raw, job, doomed))
    doomed.process.send_signal(signal.SIGSEGV)
    assert doomed.process.wait(60) == -signal.SIGSEGV
    start_worker("slow")
    assert_every_record_has_its_vector(job)
    assert job.status().deaths >= 1


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_is_stopped(
    settings: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    doomed = start_worker("slow")
    job = submit(settings)
    eventually(lambda: in_the_middle(raw, job, doomed))
    doomed.process.send_signal(signal.SIGSTOP)
    doomed.kill()
    start_worker("slow")
    assert_every_record_has_its_vector(job)
    assert job.status().deaths >= 1


@pytest.mark.slow
def test_a_worker_that_is_stopped_again_and_again_is_not_said_to_have_died(
    environment: dict[str, str], raw: redis_py.Redis, broker: Broker, start_worker: StartWorker
) -> None:
    environment["EMBEDCTL_LEASE_S"] = "0.5"
    quick = settings_of(environment)
    worker = start_worker("slow")
    job = submit(quick, records=60, chunk_size=2)
    reaper = Reaper(broker, interval_s=0.05)

    def lapsed_beyond(times: int) -> bool:
        reaper.round()
        return job.status().lapsed > times

    for _ in range(10):
        eventually(lambda: owners(raw, job))
        before = job.status().lapsed
        worker.process.send_signal(signal.SIGSTOP)
        eventually(partial(lapsed_beyond, before))
        worker.process.send_signal(signal.SIGCONT)
    assert_every_record_has_its_vector(job, 60)
    status = job.status()
    assert status.lapsed >= 10
    assert (status.deaths, status.failed, status.trouble) == (0, 0, None)
    assert "encoding it alone" not in worker.log()


@pytest.mark.slow
def test_sigterm_in_the_middle_of_a_suspect_chunk_hands_it_back_and_blames_nobody(
    settings: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    doomed = start_worker("slow")
    job = submit(settings, records=60, chunk_size=60)
    eventually(lambda: in_the_middle(raw, job, doomed))
    doomed.kill()
    leaving = start_worker("slow")
    eventually(lambda: row_in_hand(raw, job) >= 2)
    leaving.process.terminate()
    assert leaving.process.wait(120) == 0
    assert owners(raw, job) == {}
    assert job.status().chunks_done == 0
    (suspect,) = job.suspects()
    assert (suspect.given_up, len(suspect.deaths)) == ((), 1)
    start_worker("slow")
    assert_every_record_has_its_vector(job, 60)
    assert job.status().deaths == 1


def interrupt_twice(worker: WorkerProcess) -> None:
    """What Ctrl-C twice does to a worker in a terminal."""
    worker.process.send_signal(signal.SIGINT)
    eventually(lambda: "a second Ctrl-C" in worker.log())
    worker.process.send_signal(signal.SIGINT)
    assert worker.process.wait(60) == 0


@pytest.mark.slow
def test_ctrl_c_twice_in_the_middle_of_a_chunk_loses_nothing(
    settings: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    leaving = start_worker("slow")
    job = submit(settings)
    eventually(lambda: in_the_middle(raw, job, leaving, chunks=2))
    interrupt_twice(leaving)
    assert "gives back" in leaving.log()
    assert owners(raw, job) == {}
    start_worker("slow")
    assert_every_record_has_its_vector(job)
    assert job.status().deaths == 0


def test_ctrl_c_twice_is_no_error(settings: Settings, raw: redis_py.Redis, start_worker: StartWorker) -> None:
    leaving = start_worker("slow")
    job = submit(settings, records=10)
    eventually(lambda: in_the_middle(raw, job, leaving))
    interrupt_twice(leaving)
    assert "Traceback" not in leaving.log()


@pytest.mark.slow
def test_a_kill_from_outside_in_careful_mode_costs_the_record_at_hand_at_most(
    settings: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    doomed = start_worker("slow")
    job = submit(settings, records=20)
    kill_in_the_middle(raw, job, doomed)
    unlucky = start_worker("slow")
    eventually(lambda: row_in_hand(raw, job) >= 3)
    unlucky.process.send_signal(signal.SIGSTOP)  # it goes no further while we read where it is
    at = {chunk * 10 + int(owner[2]) for chunk, owner in owners(raw, job).items() if owner[2:]}
    unlucky.kill()
    start_worker("slow")
    status = ended(job)
    assert status.done >= 19
    assert {(error.position, error.code) for error in job.errors()} <= {
        (position + late, "crashed_worker") for position in at for late in (0, 1)
    }
    retried = job.retry_failed()
    assert retried == status.failed
    assert_every_record_has_its_vector(job, 20)


def test_one_worker_with_two_suspect_chunks_does_one_after_the_other(
    settings: Settings, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    doomed = start_worker("slow")
    job = submit(settings, records=20)
    kill_in_the_middle(raw, job, doomed)
    careful = start_worker("slow")
    eventually(lambda: len(job.suspects()) == 2)
    assert_every_record_has_its_vector(job, 20)
    assert careful.log().count("encoding it alone") == 2
    assert job.status().deaths == 2


@pytest.mark.slow
def test_all_workers_die_and_later_ones_go_on(
    settings: Settings, raw: redis_py.Redis, broker: Broker, start_worker: StartWorker
) -> None:
    everybody = [start_worker("slow"), start_worker("slow")]
    job = submit(settings)
    eventually(lambda: len(owners(raw, job)) >= 3)
    for worker in everybody:
        worker.kill()
    broker.workers.witness()
    assert job.status().live_workers == 0
    before = job.status()
    assert not before.state.ended
    later = [start_worker("slow"), start_worker("slow")]
    assert_every_record_has_its_vector(job)
    assert all(worker.process.poll() is None for worker in later)


CLASS = """
[classes.hungry]
backend = "hungry"
options = {dim = 16}
"""


@pytest.fixture
def hungry(environment: dict[str, str], short_folder: Path) -> Settings:
    """Settings with a class whose workers take real memory."""
    config = short_folder / "embedctl.toml"
    config.write_text(config.read_text() + CLASS)
    return settings_of(environment)


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup within our own, so that every limit on us holds for it too."""

    folder: Path

    @classmethod
    def make(cls, limit_bytes: int) -> MemoryGroup:
        """Make one, or skip the test."""
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if controllers == "memory":
                root, limit, swap = (
                    Path("/sys/fs/cgroup/memory"),
                    "memory.limit_in_bytes",
                    "memory.memsw.limit_in_bytes",
                )
            elif number == "0":
                root, limit, swap = Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"
            else:
                continue
            group = cls(root / path.lstrip("/") / f"embedctl-test-{os.getpid()}")
            try:
                group.folder.mkdir()
            except OSError:
                continue
            try:
                (group.folder / limit).open("r+").close()  # no plain folder, where nothing is mounted
                (group.folder / limit).write_text(str(limit_bytes))
                if (group.folder / swap).exists():
                    (group.folder / swap).write_text("0" if swap.endswith("max") else str(limit_bytes))
            except OSError:
                group.folder.rmdir()
                continue
            return group
        pytest.skip("no memory cgroup can be made here")

    def kills(self) -> int:
        """Number of processes that the kernel's out-of-memory killer has killed in this group."""
        for name in ("memory.events", "memory.oom_control"):
            if (self.folder / name).exists():
                facts = dict(line.split() for line in (self.folder / name).read_text().splitlines())
                return int(facts["oom_kill"])
        raise AssertionError("it counts no kills")


@pytest.fixture
def memory_group() -> Iterator[MemoryGroup]:
    """Room for a worker and a few of its rows, and not for a batch of ten."""
    group = MemoryGroup.make(400 * 2**20)
    yield group
    eventually(lambda: not (group.folder / "cgroup.procs").read_text())
    group.folder.rmdir()


@pytest.mark.slow
def test_the_kernel_kills_a_worker_for_its_memory_and_one_record_alone_is_too_large(
    memory_group: MemoryGroup, hungry: Settings, start_worker: StartWorker
) -> None:
    start = partial(start_worker, prepare=partial(register, memory_group.folder))
    texts = [f"text {i}" for i in range(20)]
    texts[13] += " huge"
    with kept_alive(start, 1, hardware="hungry") as workers:
        job = enqueue_embeddings(texts, hardware="hungry", chunk_size=10, settings=hungry)
        status = ended(job)
        assert (status.done, status.failed) == (19, 1)
        assert [(error.position, error.code) for error in job.errors()] == [(13, "crashed_worker")]
        assert deaths(workers) == [-signal.SIGKILL] * 2
    assert memory_group.kills() == 2
    good = [at for at in range(20) if at != 13]
    np.testing.assert_array_equal(job.vectors()[good], reference([texts[at] for at in good]))


def test_a_worker_whose_memory_is_capped_halves_its_batches_and_lives_on(
    hungry: Settings, start_worker: StartWorker
) -> None:
    worker = start_worker("hungry", prepare=register)
    first = enqueue_embeddings(["text"], hardware="hungry", settings=hungry)  # starts all of its threads
    first.wait(timeout=60)
    size = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    cap = size + 4 * MEGABYTES * 2**20
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (cap, cap))
    texts = [f"text {i}" for i in range(20)]
    texts[13] += " huge"
    job = enqueue_embeddings(texts, hardware="hungry", chunk_size=10, settings=hungry)
    status = ended(job)
    assert (status.done, status.failed, status.deaths) == (19, 1, 0)
    assert [(error.position, error.code) for error in job.errors()] == [(13, "out_of_memory")]
    good = [at for at in range(20) if at != 13]
    np.testing.assert_array_equal(job.vectors()[good], reference([texts[at] for at in good]))
    assert "memory is too small" in worker.log()
    assert worker.process.poll() is None
