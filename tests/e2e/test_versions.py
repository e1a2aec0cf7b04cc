"""Workers and producers of two versions side by side, as while a cluster is upgraded host by host.

The newer version is this one with another number: it writes 8 into tickets, jobs and chunks, where this one writes 1,
2 for jobs with options that version 1 did not know, 3 for jobs that keep fields, 4 for jobs in fp16 or that count
tokens, 5 for jobs whose chunks are outside of Redis, 6 for jobs in a lane, or 7 for those of a tenant. Versions before
this one know only the lower numbers.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis as redis_py

from embedctl import Job, JobError, JobState, JobStatus, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.tickets import Ticket
from embedctl_config import keys, wire
from embedctl_config.settings import Settings
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl, before_all_else, changed, process_state
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, WorkerProcess

SubmitNewer = Callable[..., Job]
StartBefore = Callable[..., WorkerProcess]

TEXTS = [f"text {i} " + "word " * 60 for i in range(40)]
NEWER = "from embedctl_config import wire; wire.VERSION = 9; wire.version_for = lambda *job: 9"
BEFORE = "from embedctl_config import wire; wire.VERSION = {}"


@pytest.fixture
def newer(short_folder: Path) -> dict[str, str]:
    """The variables that make a process one of the newer version."""
    return before_all_else(short_folder, "newer", NEWER)


@pytest.fixture
def start_newer(start_worker: StartWorker, environment: dict[str, str], newer: Mapping[str, str]) -> StartWorker:
    """Starts workers of the newer version."""

    def start(*arguments: str) -> WorkerProcess:
        with changed(environment, newer):
            return start_worker(*arguments)

    return start


@pytest.fixture
def start_before(start_worker: StartWorker, environment: dict[str, str], short_folder: Path) -> StartBefore:
    """Starts workers of a version before this one, which is 1 unless a number is given."""

    def start(*arguments: str, version: int = 1) -> WorkerProcess:
        with changed(environment, before_all_else(short_folder, f"before-{version}", BEFORE.format(version))):
            return start_worker(*arguments)

    return start


@pytest.fixture
def submit_newer(
    embedctl: RunEmbedctl, newer: Mapping[str, str], short_folder: Path, settings: Settings
) -> SubmitNewer:
    """Submit the texts as a producer of the newer version. Return the job as the older version sees it."""

    def submit(*options: str) -> Job:
        (short_folder / "corpus.txt").write_text("\n".join(TEXTS) + "\n")
        submitted = embedctl("submit", "corpus.txt", "--chunk-size", "10", *options, **newer)
        assert submitted.returncode == 0, submitted.stderr
        return Job.get(submitted.stdout.strip(), settings)

    return submit


def ended(job: Job) -> JobStatus:
    eventually(lambda: job.status().state.ended)
    return job.status()


def assert_fetched(embedctl: RunEmbedctl, job: Job, folder: Path, newer: Mapping[str, str]) -> None:
    """The newer version has a vector for each record."""
    fetched = embedctl("fetch", job.id, "-o", "out.npy", **newer)
    assert fetched.returncode == 0, fetched.stderr
    np.testing.assert_array_equal(np.load(folder / "out.npy"), reference(TEXTS))


def tickets(raw: redis_py.Redis, queue: str) -> list[tuple[list[object], dict[str, object]]]:
    """The tickets in a queue: each one's job and chunk, and its facts."""
    messages = [json.loads(message) for message in raw.lrange(queue, 0, -1)]
    bodies = [json.loads(base64.b64decode(message["body"])) for message in messages]
    return [(body[0], body[1]) for body in bodies]


def times_received(worker: WorkerProcess, job_id: str, chunk: int) -> int:
    """Number of tickets of a chunk that a worker took from its queue. Each was sent on under a different name."""
    return len(set(re.findall(rf"encode\[{job_id}\.{chunk}\.(\w+)\] received", worker.log())))


def all_of(raw: redis_py.Redis, job: Job) -> dict[bytes, object]:
    """Everything that Redis holds of a job, as DUMP gives it."""
    return {key: raw.dump(key) for key in raw.scan_iter(f"embed:job:{job.id}*")}


@pytest.mark.slow
def test_a_job_of_the_older_version_is_done_by_workers_of_both(
    settings: Settings,
    environment: dict[str, str],
    embedctl: RunEmbedctl,
    newer: dict[str, str],
    short_folder: Path,
    start_worker: StartWorker,
    start_newer: StartWorker,
) -> None:
    environment["EMBEDCTL_LEASE_S"] = "10"  # no lease is to lapse, however busy the machine is
    workers = [start_worker("slow"), start_newer("slow")]
    job = enqueue_embeddings(TEXTS, hardware="slow", chunk_size=5, settings=settings)
    status = ended(job)
    assert (status.state, status.done, status.lapsed) == (JobState.COMPLETED, 40, 0)
    eventually(lambda: all(worker.row().progressed_ms for worker in workers))
    assert_fetched(embedctl, job, short_folder, newer)


def test_a_producer_of_the_older_version_reads_what_a_newer_worker_made_of_its_job(
    settings: Settings, start_newer: StartWorker
) -> None:
    start_newer()
    job = enqueue_embeddings(TEXTS, settings=settings)
    assert ended(job).done == 40
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_records_that_failed_at_a_newer_worker_are_retried_by_an_older_one(
    settings: Settings, start_worker: StartWorker, start_newer: StartWorker
) -> None:
    """As when an upgrade is taken back."""
    newer = start_newer("poison")
    job = enqueue_embeddings(["one", "fail-encoder", "three"], hardware="poison", settings=settings)
    assert ended(job).failed == 1
    newer.stop()
    start_worker("poison")
    assert job.retry_failed() == 1
    status = ended(job)
    assert (status.done, status.failed, status.trouble, status.lost_chunks) == (2, 1, None, None)


@pytest.mark.slow
def test_a_job_of_the_newer_version_is_left_to_newer_workers(
    raw: redis_py.Redis,
    embedctl: RunEmbedctl,
    newer: dict[str, str],
    settings: Settings,
    short_folder: Path,
    start_worker: StartWorker,
    start_newer: StartWorker,
    submit_newer: SubmitNewer,
) -> None:
    job = submit_newer()
    older = start_worker()
    before = all_of(raw, job)
    eventually(lambda: all(times_received(older, job.id, chunk) >= 2 for chunk in range(4)))
    assert all_of(raw, job) == before
    mine = enqueue_embeddings(TEXTS[:5], settings=settings)
    assert ended(mine).done == 5
    np.testing.assert_array_equal(mine.vectors(), reference(TEXTS[:5]))
    eventually(lambda: older.row().progressed_ms)
    assert all_of(raw, job) == before

    newest = start_newer()
    status = ended(job)
    assert (status.state, status.done, status.claims, status.lapsed) == (JobState.COMPLETED, 40, 4, 0)
    assert status.pinned_by == newest.row().instance
    assert_fetched(embedctl, job, short_folder, newer)


@pytest.mark.slow
def test_both_versions_submit_and_all_jobs_end(
    embedctl: RunEmbedctl,
    newer: dict[str, str],
    settings: Settings,
    short_folder: Path,
    start_worker: StartWorker,
    start_newer: StartWorker,
    submit_newer: SubmitNewer,
) -> None:
    start_worker()
    start_newer()
    for job in [enqueue_embeddings(TEXTS, chunk_size=4, settings=settings), submit_newer()]:
        status = ended(job)
        assert (status.state, status.done, status.failed) == (JobState.COMPLETED, 40, 0)
        assert_fetched(embedctl, job, short_folder, newer)


@pytest.mark.slow
def test_a_newer_worker_that_dies_beside_an_older_one_is_taken_over_from(
    raw: redis_py.Redis,
    embedctl: RunEmbedctl,
    newer: dict[str, str],
    short_folder: Path,
    start_worker: StartWorker,
    start_newer: StartWorker,
    submit_newer: SubmitNewer,
) -> None:
    """Whoever reaps: an older reaper does nothing for a newer job."""
    doomed = start_newer("slow")
    job = submit_newer("--class", "slow")

    def stopped_with_two_chunks() -> bool:
        doomed.process.send_signal(signal.SIGSTOP)
        eventually(lambda: process_state(doomed.process.pid) == "T")
        if raw.hlen(keys.owners(job.id)) == 2:
            return True
        doomed.process.send_signal(signal.SIGCONT)
        return False

    eventually(stopped_with_two_chunks)
    doomed.kill()
    start_worker("slow")
    start_newer("slow")
    status = ended(job)
    assert (status.done, status.failed, status.deaths) == (40, 0, 2)
    assert_fetched(embedctl, job, short_folder, newer)


def test_an_older_worker_does_not_keep_the_newer_ones_from_looking_after_their_jobs(
    raw: redis_py.Redis, broker: Broker, start_worker: StartWorker, start_newer: StartWorker, submit_newer: SubmitNewer
) -> None:
    """One of all processes reaps in each interval. It must not always be the same one."""
    start_worker()
    start_newer()
    job = submit_newer("--class", "slow")
    live = broker.connection.now_ms() + 3600_000
    raw.zadd(keys.queue_workers(job.status().queue), {"somebody else": live})  # or there were no use in reaping
    raw.zadd(keys.due(job.id), {"0": 1})
    eventually(lambda: raw.zscore(keys.due(job.id), 0) != 1)


def test_a_newer_ticket_is_in_the_queue_again_as_it_was(
    raw: redis_py.Redis, broker: Broker, start_worker: StartWorker
) -> None:
    queue, name = keys.queue("dummy", "dummy"), "20990101-000000-0000000000"
    facts = {"version": wire.VERSION + 1, "colour": "blue", "of": {"many": [1, 2]}}
    broker.tickets.forward([Ticket(queue, name, 3, facts)])
    worker = start_worker()
    eventually(lambda: times_received(worker, name, 3) >= 2)
    assert worker.stop() == 0
    assert tickets(raw, queue) == [([name, 3], facts)]
    assert raw.hlen("unacked") == 0


def test_a_newer_ticket_finds_its_way_to_a_newer_worker(
    raw: redis_py.Redis,
    settings: Settings,
    environment: dict[str, str],
    broker: Broker,
    start_worker: StartWorker,
    start_newer: StartWorker,
) -> None:
    environment["EMBEDCTL_REISSUE_S"] = "60"  # no other ticket comes to help
    job = enqueue_embeddings(TEXTS, settings=settings.replace(reissue_s=60))
    queue = job.status().queue
    raw.delete(queue)
    broker.tickets.forward([Ticket(queue, job.id, 0, {"version": wire.VERSION + 1, "colour": "blue"})])
    older = start_worker()
    eventually(lambda: times_received(older, job.id, 0) >= 2)
    assert job.status().claims == 0
    start_newer()
    assert (ended(job).done, job.status().claims) == (40, 1)


def test_a_ticket_of_this_version_may_say_more_than_is_known(
    raw: redis_py.Redis, settings: Settings, environment: dict[str, str], broker: Broker, start_worker: StartWorker
) -> None:
    environment["EMBEDCTL_REISSUE_S"] = "60"
    job = enqueue_embeddings(TEXTS, settings=settings.replace(reissue_s=60))
    raw.delete(job.status().queue)
    broker.tickets.forward([Ticket(job.status().queue, job.id, 0, {"version": 1, "colour": "blue"})])
    start_worker()
    assert (ended(job).done, job.status().claims) == (40, 1)
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_job_of_the_newer_version_is_neither_cancelled_nor_discarded_by_an_older_one(
    settings: Settings, raw: redis_py.Redis
) -> None:
    job = enqueue_embeddings(["text"], settings=settings)
    raw.hset(keys.job(job.id), "version", wire.VERSION + 1)
    for give_up in (job.cancel, job.discard):
        with pytest.raises(JobError, match="newer embedctl"):
            give_up()
    assert raw.exists(keys.chunk_input(job.id, 0))


def test_a_job_without_later_options_is_done_by_a_worker_of_the_version_before(
    settings: Settings, start_before: StartBefore
) -> None:
    before = start_before()
    job = enqueue_embeddings(["one", "fail", "three"], settings=settings)
    status = ended(job)
    assert (status.version, status.done, status.pinned_by) == (1, 3, before.row().instance)
    np.testing.assert_array_equal(job.vectors(), reference(["one", "fail", "three"]))


@pytest.mark.parametrize(
    ("options", "version"),
    [({"dimensions": 5}, 2), ({"truncation": "mean"}, 2), ({"keep": ("title",)}, 3), ({"hardware": "half"}, 4)],
    ids=str,
)
def test_a_job_with_later_options_waits_for_a_worker_that_knows_them(
    options: dict[str, Any],
    version: int,
    raw: redis_py.Redis,
    settings: Settings,
    start_worker: StartWorker,
    start_before: StartBefore,
) -> None:
    hardware = options.get("hardware", "dummy")
    before = start_before(hardware, version=version - 1)
    items = [{"text": text, "title": text[:7]} for text in TEXTS]
    job = enqueue_embeddings(items, chunk_size=10, settings=settings, **options)
    untouched = all_of(raw, job)
    eventually(lambda: all(times_received(before, job.id, chunk) >= 2 for chunk in range(4)))
    assert all_of(raw, job) == untouched
    if hardware == "dummy":
        plain = enqueue_embeddings(TEXTS[:5], settings=settings)
        assert ended(plain).done == 5

    now = start_worker(hardware)
    status = ended(job)
    assert (status.version, status.done, status.claims, status.lapsed) == (version, 40, 4, 0)
    assert status.pinned_by == now.row().instance
    expected = reference(TEXTS).astype(np.float64)[:, : options.get("dimensions")]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(job.vectors(), expected, rtol=0, atol=1e-6 if version < 4 else 2**-12)
    kept = [fields for chunk in job.iter_results() for fields in chunk.kept or []]
    assert kept == ([{"title": text[:7]} for text in TEXTS] if "keep" in options else [])


@pytest.mark.slow
def test_a_drained_job_is_left_to_workers_that_know_of_draining(
    raw: redis_py.Redis,
    settings: Settings,
    start_worker: StartWorker,
    start_before: StartBefore,
    short_folder: Path,
) -> None:
    """To an older version, drained chunks would be lost: to its reaper, to its producer, and to whoever reads."""
    before = start_before(version=wire.DRAINS_SINCE - 1)
    job = enqueue_embeddings([*TEXTS[:19], ""], chunk_size=10, settings=settings)
    assert (ended(job).version, job.status().done) == (1, 19)
    job.drain(short_folder / "parts")
    assert job.status().version == wire.DRAINS_SINCE
    assert job.retry_failed() == 1
    eventually(lambda: times_received(before, job.id, 2) >= 2)  # it sends the ticket on
    raw.hset(keys.job(job.id), "progressed_ms", 1)  # so that reapers audit it
    time.sleep(2.0)  # two rounds of the reaper; a busy machine may hide what it must not do
    assert (job.status().lost_chunks, job.status().state) == (None, JobState.RUNNING)

    start_worker()
    assert (ended(job).done, job.status().failed, job.status().lost_chunks) == (19, 1, None)
    job.drain(short_folder / "parts")
    np.testing.assert_array_equal(job.vectors()[:19], reference(TEXTS[:19]))


@pytest.mark.slow
def test_an_older_command_says_that_it_can_not_read_kept_fields(
    settings: Settings,
    embedctl: RunEmbedctl,
    short_folder: Path,
    start_worker: StartWorker,
) -> None:
    start_worker()
    job = enqueue_embeddings([{"text": "a"}], keep=["title"], idempotency_key="key", settings=settings)
    assert ended(job).done == 1
    before = before_all_else(short_folder, "before", BEFORE.format(2))
    fetched = embedctl("fetch", job.id, "-o", "out.jsonl", **before)
    assert (fetched.returncode, "upgrade" in fetched.stderr) == (1, True)
    (short_folder / "c.jsonl").write_text('{"text": "a"}\n')
    for command in (["cancel", job.id], ["submit", "c.jsonl", "--resume", job.id]):
        refused = embedctl(*command, **before)
        assert refused.returncode != 0
    assert job.status().done == 1


def test_an_older_command_says_that_it_can_not_read_vectors_in_float16(
    settings: Settings, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker("half")
    job = enqueue_embeddings(["a"], hardware="half", settings=settings)
    assert ended(job).done == 1
    fetched = embedctl("fetch", job.id, "-o", "out.npy", **before_all_else(short_folder, "before", BEFORE.format(3)))
    assert (fetched.returncode, "upgrade it" in fetched.stderr) == (1, True)
    assert not (short_folder / "out.npy").exists()


def test_a_job_that_counts_tokens_is_left_to_workers_that_do(
    raw: redis_py.Redis, settings: Settings, start_worker: StartWorker, start_before: StartBefore
) -> None:
    before = start_before(version=3)
    job = enqueue_embeddings(["a b", ""], count_tokens=True, settings=settings)
    eventually(lambda: times_received(before, job.id, 0) >= 2)
    assert job.status().done == 0
    start_worker()
    assert [chunk.tokens.tolist() for chunk in job.iter_results(timeout=60) if chunk.tokens is not None] == [[2, 0]]
    assert raw.getrange(keys.chunk_result(job.id, 0), 40, 40) == b"\x01"  # float32, although version 4 knows float16
    assert before.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_job_in_fp16_that_was_begun_before_an_upgrade_goes_on_with_its_own_version(
    version: int,
    raw: redis_py.Redis,
    settings: Settings,
    embedctl: RunEmbedctl,
    short_folder: Path,
    start_worker: StartWorker,
    start_before: StartBefore,
) -> None:
    """Its producer is submitted to again, and its workers are of both versions: all results are as the first reader
    expects them."""
    (short_folder / "c.txt").write_text("\n".join(TEXTS) + "\n")
    submit = ("submit", "c.txt", "--class", "half", "--chunk-size", "10", "--resume", "key")
    before = before_all_else(
        short_folder, f"before-{version}", f"{BEFORE.format(version)}; wire.version_for = lambda *job: {version}"
    )
    first = embedctl(*submit, **before)
    assert first.returncode == 0, first.stderr
    again = embedctl(*submit)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    older, now = start_before("half", version=version), start_worker("half")
    job = Job.get(first.stdout.strip(), settings)
    status = ended(job)
    assert (status.version, status.done) == (version, 40)
    assert {raw.getrange(keys.chunk_result(job.id, chunk), 40, 40) for chunk in range(4)} == {b"\x01"}
    fetched = embedctl("fetch", job.id, "-o", "out.npy", **before)
    assert fetched.returncode == 0, fetched.stderr
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference(TEXTS))
    assert older.stop() == now.stop() == 0
