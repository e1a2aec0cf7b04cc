"""Redis away, emptied, cut short, full or damaged; silent networks; races: each vector comes, and comes once."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import redis as redis_py

from embedctl import Job, JobLost, JobState, enqueue_embeddings
from embedctl.corpus.rows import Rows, records_of
from embedctl.jobs.enqueue import submit
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.forked import Process
from tests.support.here import Here
from tests.support.jobs import assert_encoded
from tests.support.prepared import WaitFor
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisServer
from tests.support.store import active_jobs
from tests.support.waiting import PATIENCE_S, eventually

#: Each of these texts is one batch for a worker of the class "slow": a tenth of a second.
TEXTS = [f"text {i} " + "word " * 60 for i in range(40)]
T = TypeVar("T")


@pytest.fixture
def redis_server(own_redis: RedisServer) -> RedisServer:
    """A Redis for this test alone, which is stopped, emptied and cut short here."""
    return own_redis


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run in a thread that a failed test does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (whoever asks for the result gets it)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def held_at(at: int, gate: threading.Event) -> Iterator[str]:
    """Yield the texts. The text at `at` and all later ones come only once the gate is open."""
    yield from TEXTS[:at]
    assert gate.wait(PATIENCE_S)
    yield from TEXTS[at:]


def active_job(broker: Broker) -> Job:
    """The only active job, as soon as its producer has made it."""
    eventually(lambda: list(active_jobs(broker)))
    [job_id] = active_jobs(broker)
    return Job(job_id, broker)


def assert_whole(job: Job, texts: list[str] = TEXTS) -> None:
    """Every record has its vector, each counted once, and nobody is blamed for what Redis did."""
    assert_encoded(job, texts)
    assert job.status().deaths == 0


def corpus(folder: Path, texts: list[str] = TEXTS) -> str:
    """Write the texts to a file. Return its name, as an argument for the command line."""
    (folder / "corpus.txt").write_text("".join(f"{text}\n" for text in texts))
    return "corpus.txt"


def forget_everything(server: RedisServer) -> None:
    (server.folder / "appendonly.aof").unlink(missing_ok=True)
    shutil.rmtree(server.folder / "appendonlydir", ignore_errors=True)


@contextmanager
def standing_still(process: Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


# Redis and the network away


@pytest.mark.slow
def test_a_worker_whose_connections_are_half_open(here: Here, proxy: Proxy) -> None:
    direct = here.environment["EMBEDCTL_REDIS_URL"]
    here.environment["EMBEDCTL_REDIS_URL"] = proxy.url
    cut_off = here.start_worker("slow")
    here.environment["EMBEDCTL_REDIS_URL"] = direct
    beside = here.start_worker("slow")
    job = enqueue_embeddings(TEXTS, hardware="slow", chunk_size=5, settings=here.settings)
    eventually(lambda: cut_off.row().holding and beside.row().holding)
    proxy.freeze()
    accepted = proxy.accepted
    job.wait(timeout=60)
    assert_whole(job)
    assert job.status().lapsed > 0
    eventually(lambda: proxy.accepted > accepted, what="a new connection, after a socket's time-out", show=cut_off.log)
    proxy.thaw(resume=True)
    assert beside.stop() == 0
    again = enqueue_embeddings(TEXTS[:10], hardware="slow", chunk_size=5, settings=here.settings)
    again.wait(timeout=60)
    assert_whole(again, TEXTS[:10])
    assert_whole(job)
    assert cut_off.process.poll() is None
    assert cut_off.stop() == 0


@pytest.mark.slow
def test_who_was_cut_off_too_takes_nobody_for_dead(here: Here, settings: Settings, redis_server: RedisServer) -> None:
    texts = [*TEXTS, *TEXTS]
    # Who comes back within two leases is not taken for dead: ten seconds, in which a busy machine gets there.
    longer = here.folder / "longer.toml"
    longer.write_text(Path(here.environment["EMBEDCTL_CONFIG"]).read_text().replace("lease_s = 1.0", "lease_s = 5.0"))
    here.environment["EMBEDCTL_CONFIG"], settings = str(longer), settings.replace(lease_s=5.0)
    first, later = here.start_worker("slow"), here.start_worker("slow")
    job = enqueue_embeddings(texts, hardware="slow", chunk_size=20, settings=settings)
    waited = in_background(lambda: job.wait(timeout=60))
    eventually(lambda: first.row().holding and later.row().holding)
    assert redis_server.process is not None
    with standing_still(later.process):
        with standing_still(redis_server.process):
            time.sleep(keys.HEARTBEAT_TTL_S + 1)  # after it, no heartbeat counts that Redis knows of
        eventually(lambda: any(row.pid == first.pid for row in here.broker.workers.alive()))
        time.sleep(0.5)  # a network comes back for some hosts before others
    assert waited.result(60).done == len(texts)
    assert_whole(job, texts)


# Redis without what it knew


@pytest.mark.slow
def test_a_redis_that_comes_back_empty(here: Here, redis_server: RedisServer) -> None:
    texts = TEXTS[:20]
    name = corpus(here.folder, texts)
    command = ["submit", name, "--class", "slow", "--chunk-size", "5", "--resume", "k"]
    lost = here.embedctl(*command).stdout.strip()
    waiting = in_background(lambda: here.embedctl("wait", lost))
    eventually(lambda: any(each["cmd"] == "xread" for each in here.raw.client_list()))
    worker = here.start_worker("slow")
    eventually(lambda: worker.row().holding)
    redis_server.stop()
    forget_everything(redis_server)
    redis_server.start()

    with pytest.raises(JobLost, match="lost by the broker"):
        Job(lost, here.broker).status()
    assert waiting.result(60).returncode == 4
    for verb in ("status", "wait"):
        told = here.embedctl(verb, lost, status=4)
        assert "lost by the broker" in told.stderr

    again = here.embedctl(*command, "--wait", status=0)
    made = again.stdout.strip()
    assert made != lost
    assert_whole(Job(made, here.broker), texts)
    assert "lost by the broker" in here.embedctl("status", lost).stderr


@pytest.mark.slow
def test_a_submission_lost_in_a_crash_is_repaired_by_the_same_command(here: Here, redis_server: RedisServer) -> None:
    name = corpus(here.folder)
    command = ["submit", name, "--class", "slow", "--chunk-size", "5", "--resume", "k"]
    settings = here.broker.settings
    gate = threading.Event()
    submitted = in_background(
        lambda: enqueue_embeddings(
            held_at(20, gate),
            hardware="slow",
            chunk_size=5,
            idempotency_key="k",
            digests=True,  # as a command asks for them
            settings=settings,
        )
    )
    job = active_job(here.broker)
    eventually(lambda: job.status().chunks == 3)
    written = redis_server.written()
    assert written is not None
    gate.set()
    assert submitted.result(60).id == job.id
    assert (job.status().state, job.status().chunks) == (JobState.QUEUED, 8)
    redis_server.forget_since((*written[:2], written[2] - 7))  # in the middle of a command

    assert job.status().chunks <= 3
    here.raw.delete(keys.producer(job.id))  # its lease lapses 30 s after its last sign of life
    assert "submitting (stalled)" in here.embedctl("status", job.id).stdout
    here.start_worker("slow")
    again = here.embedctl(*command, "--wait", status=0)
    assert again.stdout.strip() == job.id
    assert_whole(job)


# Chunks lost, damaged, or without room


def audit(broker: Broker, raw: redis_py.Redis, job: Job) -> tuple[int, int]:
    """The chunks that a reaper reports as lost, without its usual minute of patience."""
    reaper = Reaper(broker, interval_s=0.1, audit_after_s=0.5)

    def lost() -> bool:
        raw.delete(keys.REAPER)  # so that the turn is not the worker's now
        raw.zadd(keys.UPKEEP, {job.id: 1})
        reaper.round()
        return job.status().lost_chunks is not None

    eventually(lost)
    found = job.status().lost_chunks
    assert found is not None
    return found


def fill(raw: redis_py.Redis) -> None:
    """Leave Redis no room for anything more, whatever its buffers of connections give back."""
    raw.config_set("maxmemory", int(raw.info("memory")["used_memory"] * 0.5))


def test_lost_and_damaged_inputs_are_told_of_and_repaired_by_the_same_corpus(here: Here) -> None:
    job = enqueue_embeddings(TEXTS, chunk_size=5, idempotency_key="k", settings=here.settings)
    damages: dict[int, Callable[[bytearray], object]] = {
        1: lambda data: data.__setitem__(0, data[0] ^ 0xFF),  # the prefix of every chunk
        2: lambda data: data.__setitem__(8, data[8] ^ 0x01),  # its digest
        4: lambda data: data.__setitem__(-9, data[-9] ^ 0x20),  # a letter of a text
        5: lambda data: data.__delitem__(slice(len(data) // 2, None)),
    }
    here.raw.delete(keys.chunk_input(job.id, 3))
    for chunk, damage in damages.items():
        data = bytearray(here.broker.jobs.input(job.id, chunk) or b"")
        damage(data)
        here.raw.set(keys.chunk_input(job.id, chunk), bytes(data), keepttl=True)
    worker = here.start_worker()
    eventually(
        lambda: (
            job.status().chunks_done == 3 and not any(here.raw.exists(keys.chunk_input(job.id, at)) for at in damages)
        )
    )
    assert all(worker.logged("input is damaged", job=job.id, chunk=at, attempt=1) for at in damages)
    assert audit(here.broker, here.raw, job) == (1, 5)
    shown = here.embedctl("status", job.id).stdout
    assert "Redis lost chunks 1 to 5" in shown
    assert "its input was damaged in Redis" in next(line for line in shown.splitlines() if line.startswith("trouble"))
    assert job.status().done == 15
    with pytest.raises(JobLost, match="--resume"):
        job.wait(timeout=60)
    enqueue_embeddings(TEXTS, chunk_size=5, idempotency_key="k", settings=here.settings)
    job.wait(timeout=60)
    assert_whole(job)


@pytest.mark.slow
def test_a_full_redis_makes_everybody_wait_and_nobody_drop_anything(here: Here) -> None:
    may_encode = here.folder / "may-encode"
    may_encode.touch()
    worker = here.start_worker(prepare=WaitFor("embedctl_workers.backends.dummy:DummyBackend", "forward", may_encode))
    may_encode.unlink()
    told: list[tuple[int, str]] = []
    gate = threading.Event()
    submitted = in_background(
        lambda: submit(
            here.broker,
            records_of(held_at(23, gate), Rows(10_000)),
            SubmitOptions(chunk_size=5),
            lambda records, waiting_for: told.append((records, waiting_for)),
        )
    )
    job = active_job(here.broker)
    eventually(lambda: job.status().chunks == 4 and worker.row().holding)
    fill(here.raw)
    may_encode.touch()
    gate.set()
    eventually(lambda: told[-1] == (20, "Redis") and "held back" in worker.log())
    late = here.start_worker(wait=False)
    eventually(lambda: "waiting for room. Redis is full (" in late.log())
    full = job.status()
    time.sleep(3 * here.settings.lease_s)  # time enough for what must not happen; a busy machine may only hide it
    later = job.status()
    assert (later.done, later.records, later.chunks) == (full.done, full.records, full.chunks)
    assert told[-1] == (20, "Redis")
    assert not submitted.done()
    here.raw.config_set("maxmemory", 0)
    assert submitted.result(60).id == job.id
    job.wait(timeout=60)
    assert_whole(job)
    late.wait_ready()
    assert worker.process.poll() is None


def test_a_worker_that_loses_redis_at_its_hello_still_hears_sigterm(here: Here, redis_server: RedisServer) -> None:
    """Celery sends its first heartbeat between connecting and consuming."""
    go = here.folder / "go"
    worker = here.start_worker(prepare=WaitFor("celery.worker.heartbeat:Heart", "start", go))
    eventually(lambda: worker.logged("Connected to"), show=worker.log)
    redis_server.stop()
    go.touch()
    worker.process.terminate()
    assert worker.process.wait(PATIENCE_S) == 0, worker.log()


@pytest.mark.slow
def test_a_bell_taken_from_a_full_redis_does_not_end_the_worker(here: Here) -> None:
    worker = here.start_worker()
    eventually(lambda: worker.logged(" ready."))
    with standing_still(worker.process):
        job = enqueue_embeddings(TEXTS, chunk_size=5, settings=here.settings)
        fill(here.raw)
    eventually(lambda: "is full" in worker.log() or worker.process.poll() is not None)
    time.sleep(2 * here.settings.lease_s)  # time enough for it to end; a busy machine may only hide it
    assert worker.process.poll() is None, worker.log()
    here.raw.config_set("maxmemory", 0)
    job.wait(timeout=60)
    assert_whole(job)
    assert worker.process.poll() is None


@pytest.mark.slow
def test_all_follow_a_name_to_its_new_master(here: Here, redis_server: RedisServer, proxy: Proxy) -> None:
    """A managed Redis fails over and closes no connection: what was the master only reads from then on."""
    (redis_server.folder / "new").mkdir()
    other = RedisServer(redis_server.folder / "new")
    other.start()
    to_old, to_new = Proxy(redis_server.folder / "redis.sock"), Proxy(other.folder / "redis.sock")
    to_old.start()
    to_new.start()
    try:
        with redis_py.Redis.from_url(other.url) as new:
            new.replicaof("127.0.0.1", str(to_old.port))
            eventually(lambda: new.info("replication").get("master_link_status") == "up")
            here.environment["EMBEDCTL_REDIS_URL"] = proxy.url
            worker = here.start_worker("slow")
            settings = here.settings.replace(redis_url=proxy.url)
            job = enqueue_embeddings(TEXTS, hardware="slow", chunk_size=2, settings=settings)
            waiting = in_background(partial(job.wait, timeout=60))
            eventually(lambda: job.status().chunks_done > 2)
            new.replicaof("NO", "ONE")
            here.raw.replicaof("127.0.0.1", str(to_new.port))
            proxy.lead_to(other.folder / "redis.sock")
            assert waiting.result(60).state is JobState.COMPLETED
            assert_encoded(job, TEXTS)
            after = enqueue_embeddings(TEXTS[:9], hardware="slow", settings=settings)
            assert after.wait(timeout=60).state is JobState.COMPLETED
            assert new.exists(keys.job(after.id))
            assert worker.process.poll() is None
    finally:
        for each in (to_old, to_new, other):
            each.stop()
