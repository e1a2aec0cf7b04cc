"""Jobs whose chunks' bytes are outside of Redis: what goes wrong there costs no vector, and nothing stays for ever."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import redis as redis_py

from embedctl import Job, JobLost, JobState, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.chunk_files import ChunkFiles, Where
from embedctl.chunk_files import place as place_module
from embedctl.chunk_files.chunks import GRACE_S
from embedctl.chunk_files.place import Place
from embedctl.chunk_files.references import parse_reference
from embedctl.sweeper import Sweeper
from embedctl_config import keys
from embedctl_config.errors import ChunkFilesUnavailable, SettingsError
from embedctl_config.settings import Settings
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.chunk_place import Forgetful
from tests.support.jobs import reference
from tests.support.limits import limited
from tests.support.redis_server import RedisServer
from tests.support.rig import Rig
from tests.support.store import audited, overdue

TEXTS = [f"text {number}" for number in range(40)]
#: Its fifth chunk has a record that fails.
SOME_FAIL = [*TEXTS[:33], "", *TEXTS[34:]]
CHUNKS, SIZE = 5, 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def settings(settings: Settings, folder: Path) -> Settings:
    return limited(settings.replace(chunk_files=str(folder), lease_s=30.0), chunk_inline_bytes=0)


@pytest.fixture
def rig(broker: Broker, settings: Settings) -> Rig:
    return Rig(broker, settings, DummyBackend(dim=16))


@pytest.fixture
def submitted(settings: Settings) -> Callable[..., Job]:
    def submit(texts: list[str] = TEXTS, **options: Any) -> Job:
        return enqueue_embeddings(texts, settings=settings, chunk_size=SIZE, **options)

    return submit


def run_all(rig: Rig, job: Job) -> None:
    for chunk in range(job.status().chunks):
        rig.run(job, chunk)


def files(folder: Path, kind: str = "*") -> list[Path]:
    return sorted(path for path in folder.glob(f"*/*/*/{kind}/*/*") if path.is_file())


def chunk_of(path: Path) -> int:
    return int(path.name.partition(".")[0])


def counts_of(job: Job) -> tuple[JobState, int, int]:
    status = job.status()
    return status.state, status.done, status.failed


def aged(folder: Path) -> None:
    """Make everything old enough to be swept."""
    for path in files(folder):
        os.utime(path, (time.time() - 2 * GRACE_S,) * 2)


def sweeper(broker: Broker) -> Sweeper:
    return Sweeper(broker, rest_s=0, again_s=0)


def swept(broker: Broker, raw: redis_py.Redis) -> int:
    """A whole sweep, with both looks; returns how many names were removed."""
    one = sweeper(broker)
    raw.delete(keys.SWEEP)
    return one.round() + one.round()


def test_redis_holds_no_byte_of_a_text_or_a_vector(
    submitted: Callable[..., Job], rig: Rig, folder: Path, raw: redis_py.Redis
) -> None:
    job = submitted()
    assert len(files(folder, "in")) == CHUNKS
    assert all(raw.strlen(keys.chunk_input(job.id, chunk)) < 200 for chunk in range(CHUNKS))
    run_all(rig, job)
    status = job.status()
    assert (status.state, status.waiting_bytes) == (JobState.COMPLETED, 0)
    assert all(raw.strlen(keys.chunk_result(job.id, chunk)) < 200 for chunk in range(CHUNKS))
    assert status.result_bytes == sum(path.stat().st_size for path in files(folder, "out"))
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_small_chunk_stays_in_redis(settings: Settings, rig: Rig, folder: Path) -> None:
    job = enqueue_embeddings(TEXTS, settings=limited(settings, chunk_inline_bytes=1 << 20))
    rig.run(job)
    assert len(files(folder, "out")) == 1  # this worker's own setting says so
    assert not files(folder, "in")
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_job_of_a_producer_without_chunk_files_stays_in_redis(settings: Settings, rig: Rig, folder: Path) -> None:
    job = enqueue_embeddings(TEXTS, settings=settings.replace(chunk_files=""))
    rig.run(job)
    assert not folder.exists()
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_worker_that_does_not_know_the_place_gives_the_chunk_back_and_says_so(
    submitted: Callable[..., Job], settings: Settings, rig: Rig
) -> None:
    job = submitted()
    lost = Rig(broker := Broker.connect(settings.replace(chunk_files="")), settings, DummyBackend(dim=16))
    lost.run(job)
    assert "set chunk_files to what the job's producer has" in (job.status().trouble or "")
    assert job.status().done == 0
    broker.close()
    run_all(rig, job)
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_producer_that_does_not_know_the_place_is_told(settings: Settings, submitted: Callable[..., Job]) -> None:
    job = submitted(idempotency_key="one")
    with pytest.raises(SettingsError, match=f"{job.id} keeps its chunks outside of Redis"):
        enqueue_embeddings(TEXTS, settings=settings.replace(chunk_files=""), chunk_size=SIZE, idempotency_key="one")


def test_resuming_a_job_puts_nothing_twice(submitted: Callable[..., Job], rig: Rig, folder: Path) -> None:
    job = submitted(idempotency_key="one")
    rig.run(job, 0)
    before = files(folder)
    assert submitted(idempotency_key="one").id == job.id
    assert files(folder) == before


@pytest.mark.parametrize(
    ("kind", "damaged", "told"),
    [
        ("in", None, "gone from chunk_files"),
        ("in", lambda data: b"EMBC", "damaged"),
        ("out", None, "is gone from chunk_files"),
        ("out", lambda data: b"", "is damaged"),
        ("out", lambda data: data[:100], "is damaged"),
        ("out", lambda data: data[:-1] + b"!", "is damaged"),
    ],
)
def test_bytes_that_are_gone_or_damaged_are_told_and_repaired_by_the_corpus(
    submitted: Callable[..., Job],
    rig: Rig,
    folder: Path,
    raw: redis_py.Redis,
    kind: str,
    damaged: Callable[[bytes], bytes] | None,
    told: str,
) -> None:
    job = submitted(SOME_FAIL, idempotency_key="one")
    if kind == "out":
        run_all(rig, job)
    victim = next(path for path in files(folder, kind) if chunk_of(path) == 2)
    data = victim.read_bytes()
    victim.unlink()
    if damaged is not None:
        victim.write_bytes(damaged(data))
    if kind == "in":
        rig.run(job, 2)
        overdue(raw, job.id, 2)
        rig.run(job, 2)  # only a second verdict counts
        assert told in (job.status().trouble or "")
    else:
        with pytest.raises(JobLost, match=rf"chunk 2 of job {job.id}.* {told}: .*--resume {job.id}"):
            job.vectors()
    submitted(SOME_FAIL, idempotency_key="one")
    run_all(rig, job)
    assert counts_of(job) == (JobState.COMPLETED_WITH_ERRORS, 39, 1)
    np.testing.assert_array_equal(np.delete(job.vectors(), 33, 0), np.delete(reference(SOME_FAIL), 33, 0))


def test_a_retried_result_that_is_gone_is_repaired_by_the_corpus(
    submitted: Callable[..., Job], rig: Rig, folder: Path
) -> None:
    job = submitted(SOME_FAIL, idempotency_key="one")
    run_all(rig, job)
    assert job.retry_failed() == 1
    rig.run(job, CHUNKS)
    next(path for path in files(folder, "out") if chunk_of(path) == CHUNKS).unlink()
    submitted(SOME_FAIL, idempotency_key="one")
    run_all(rig, job)
    assert counts_of(job) == (JobState.COMPLETED_WITH_ERRORS, 39, 1)


def test_the_errors_of_an_emptied_result_do_not_wait_for_ever(
    submitted: Callable[..., Job], rig: Rig, folder: Path
) -> None:
    job = submitted(SOME_FAIL)
    run_all(rig, job)
    next(path for path in files(folder, "out") if chunk_of(path) == CHUNKS - 1).write_bytes(b"")
    with pytest.raises(JobLost, match="is damaged"):
        job.errors()


@pytest.mark.parametrize("gone", [("in",), ("in", "out")])
def test_a_chunk_whose_failed_records_are_gone_is_counted_right_and_can_be_retried(
    submitted: Callable[..., Job], rig: Rig, folder: Path, gone: tuple[str, ...]
) -> None:
    job = submitted(SOME_FAIL, idempotency_key="one")
    run_all(rig, job)
    for path in [path for kind in gone for path in files(folder, kind) if chunk_of(path) == CHUNKS - 1]:
        path.unlink()
    submitted(SOME_FAIL, idempotency_key="one")
    run_all(rig, job)
    assert counts_of(job) == (JobState.COMPLETED_WITH_ERRORS, 39, 1)
    assert job.retry_failed() == 1
    rig.run(job, CHUNKS)
    assert counts_of(job) == (JobState.COMPLETED_WITH_ERRORS, 39, 1)


@pytest.mark.parametrize("drained", [False, True])
def test_a_retry_whose_text_is_gone_is_repaired_by_the_corpus(
    submitted: Callable[..., Job],
    broker: Broker,
    rig: Rig,
    folder: Path,
    raw: redis_py.Redis,
    tmp_path: Path,
    drained: bool,
) -> None:
    job = submitted(SOME_FAIL, idempotency_key="one")
    run_all(rig, job)
    if drained:
        job.drain(str(tmp_path / "parts"))
    assert job.retry_failed() == 1
    moved = parse_reference(cast(bytes, raw.get(keys.chunk_input(job.id, CHUNKS))))
    assert moved is not None
    (folder / moved.name).unlink()
    for _ in range(3):  # two verdicts, and a claim that finds nothing
        overdue(raw, job.id, CHUNKS)
        rig.run(job, CHUNKS)
    assert "gone from chunk_files" in (job.status().trouble or "")
    audited(broker, job.id)
    assert job.status().lost_chunks == (CHUNKS, CHUNKS)
    submitted(SOME_FAIL, idempotency_key="one")
    run_all(rig, job)
    status = job.status()
    assert counts_of(job) == (JobState.COMPLETED_WITH_ERRORS, 39, 1)
    assert (status.waiting_bytes, status.lost_chunks) == (0, None)
    if drained:
        job.drain(str(tmp_path / "parts"))
    found = job.vectors()
    np.testing.assert_array_equal(np.delete(found, 33, 0), np.delete(reference(SOME_FAIL), 33, 0))


def test_a_worker_that_still_has_a_gone_text_ends_its_chunk(
    submitted: Callable[..., Job], broker: Broker, rig: Rig, raw: redis_py.Redis
) -> None:
    job = submitted(SOME_FAIL, idempotency_key="one")
    run_all(rig, job)
    assert job.retry_failed() == 1
    complete = broker.jobs.complete

    def dropped_first(*args: Any, **named: Any) -> str:
        broker.jobs.drop_input(job.id, CHUNKS)
        return complete(*args, **named)

    rig.broker.jobs.complete = dropped_first  # type: ignore[method-assign]
    rig.run(job, CHUNKS)
    before = counts_of(job)
    rig.broker.jobs.complete = complete  # type: ignore[method-assign]
    submitted(SOME_FAIL, idempotency_key="one")
    assert before == counts_of(job) == (JobState.COMPLETED_WITH_ERRORS, 39, 1)


def test_another_place_at_the_address_of_this_one_is_not_taken_for_it(
    submitted: Callable[..., Job], rig: Rig, folder: Path, settings: Settings, raw: redis_py.Redis
) -> None:
    job = submitted()
    value = cast(bytes, raw.get(keys.chunk_input(job.id, 1)))
    assert rig.broker.chunk_files.get(value)
    folder.rename(folder.with_name("away"))
    ChunkFiles(settings.chunk_files, notes=Forgetful()).make_place()
    with pytest.raises(ChunkFilesUnavailable, match="is now another place than it was"):
        rig.broker.chunk_files.get(value)
    with pytest.raises(ChunkFilesUnavailable, match="is now another place than it was"):
        rig.broker.chunk_files.put(Where(job.id, "out", 1), b"x" * 100)


@pytest.mark.parametrize("is_mountpoint", [False, True])
def test_a_new_producer_makes_no_second_place_while_the_folder_is_away(
    submitted: Callable[..., Job], settings: Settings, folder: Path, is_mountpoint: bool
) -> None:
    submitted()
    folder.rename(folder.with_name("away"))
    if is_mountpoint:
        folder.mkdir()
    broker = Broker.connect(settings)
    with pytest.raises(ChunkFilesUnavailable, match=r"held chunks as place .* is the folder mounted here"):
        broker.chunk_files.make_place()
    broker.close()
    assert not list(folder.glob("*"))


def test_nothing_is_made_in_the_place_of_a_folder_that_is_away(
    submitted: Callable[..., Job], rig: Rig, folder: Path
) -> None:
    job = submitted()
    data = rig.broker.chunk_files
    assert data.place_id == job.status().data
    folder.rename(folder.with_name("away"))
    with pytest.raises(ChunkFilesUnavailable):
        data.now()
    with pytest.raises(ChunkFilesUnavailable):
        data.put(Where(job.id, "out", 1), b"x" * 100)
    with pytest.raises(FileNotFoundError):  # it went after its mark was read
        Place(str(folder)).write("1/x", b"x")
    assert not folder.exists()


def test_a_worker_holds_its_vectors_while_the_place_is_away(
    submitted: Callable[..., Job], rig: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted()
    plane, puts = rig.broker.chunk_files, 0
    put = plane.put

    def often_away(where: Any, payload: bytes) -> bytes:
        nonlocal puts
        puts += 1
        if puts < 3:
            raise ChunkFilesUnavailable("chunk_files is away")
        return put(where, payload)

    monkeypatch.setattr(plane, "put", often_away)
    rig.run(job, 0)
    assert (puts, job.status().done) == (3, SIZE)


def test_a_worker_that_starts_while_the_place_is_away_waits_for_it(
    submitted: Callable[..., Job], rig: Rig, folder: Path
) -> None:
    job = submitted()
    folder.rename(folder.with_name("away"))
    # The worker may as well start after that: then there is nothing to wait for.
    back = threading.Timer(0.5, folder.with_name("away").rename, [folder])
    back.start()
    rig.run(job, 0)
    back.join()
    assert (job.status().done, job.status().trouble) == (SIZE, None)


def test_a_place_that_stays_away_is_told_in_the_status(
    submitted: Callable[..., Job], rig: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted()
    monkeypatch.setattr("embedctl_config.retry.RETRY_S", 0.2)
    folder.rename(folder.with_name("away"))
    rig.run(job, 0)
    assert "holds no embedctl-chunks.json" in (job.status().trouble or "")
    folder.with_name("away").rename(folder)
    run_all(rig, job)
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_producer_waits_for_the_place(
    settings: Settings, folder: Path, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def texts() -> Any:
        yield from TEXTS[:20]
        folder.rename(folder.with_name("away"))
        yield from TEXTS[20:]

    def progress(_: int, waiting_for: str) -> None:
        if waiting_for == "chunk_files":
            folder.with_name("away").rename(folder)

    job = enqueue_embeddings(texts(), settings=settings, chunk_size=SIZE, progress=progress)
    run_all(rig, job)
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_job_is_drained_as_any_other(
    submitted: Callable[..., Job], rig: Rig, folder: Path, tmp_path: Path, broker: Broker, raw: redis_py.Redis
) -> None:
    job = submitted()
    run_all(rig, job)
    job.drain(str(tmp_path / "parts"))
    assert job.status().result_bytes == 0
    assert len(files(folder, "out")) == CHUNKS  # a Redis without its last second refers to them again
    aged(folder)
    assert swept(broker, raw) == 2 * CHUNKS
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_the_answer_to_a_result_may_be_lost(
    submitted: Callable[..., Job],
    rig: Rig,
    broker: Broker,
    raw: redis_py.Redis,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = submitted()
    complete, lost = broker.jobs.complete, []

    def twice(*args: Any, **named: Any) -> str:
        lost.append(complete(*args, **named))
        return complete(*args, **named)

    monkeypatch.setattr(broker.jobs, "complete", twice)
    run_all(rig, job)
    aged(folder)
    swept(broker, raw)
    assert lost == ["ok"] * CHUNKS
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_the_sweeper_removes_what_nobody_needs_and_nothing_else(
    submitted: Callable[..., Job], rig: Rig, folder: Path, broker: Broker, raw: redis_py.Redis
) -> None:
    waits, runs = submitted(), submitted(SOME_FAIL)
    run_all(rig, runs)
    assert runs.retry_failed() == 1  # the failed record's text moves to another chunk, and keeps its name
    lost = files(folder, "out")[0].read_bytes()
    loser = files(folder, "out")[0].with_name(f"0.{'f' * 16}")
    loser.write_bytes(lost)
    strange = loser.with_name("notes.txt")
    strange.write_text("not ours")
    assert swept(broker, raw) == 0  # all of it is young
    aged(folder)
    gone = {each for each in files(folder, "in") if runs.id in str(each) and chunk_of(each) != CHUNKS - 1}
    gone |= {each for each in files(folder, "in") if runs.id in str(each) and chunk_of(each) == CHUNKS - 1}
    kept_text = parse_reference(cast(bytes, raw.get(keys.chunk_input(runs.id, CHUNKS))))
    assert kept_text is not None
    gone -= {folder / kept_text.name}
    before = set(files(folder))
    assert swept(broker, raw) == len(gone) + 1
    assert before - set(files(folder)) == gone | {loser}
    assert strange.exists()
    rig.run(runs, CHUNKS)
    run_all(rig, waits)
    np.testing.assert_array_equal(waits.vectors(), reference(TEXTS))


def test_the_bytes_of_jobs_that_are_gone_are_removed_with_their_folders(
    submitted: Callable[..., Job], folder: Path, broker: Broker, raw: redis_py.Redis
) -> None:
    discarded, expired, cancelled = submitted(), submitted(), submitted()
    discarded.discard()
    assert not [path for path in files(folder) if discarded.id in str(path)]
    cancelled.cancel()
    raw.delete(*raw.keys(f"embed:job:{expired.id}*"))
    assert not [path for path in files(folder) if cancelled.id in str(path)]
    aged(folder)
    assert swept(broker, raw) == CHUNKS
    swept(broker, raw)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["embedctl-chunks.json"]
    assert not list(folder.glob("*/*"))


def test_one_name_that_can_not_be_looked_at_or_removed_keeps_no_other_one(
    submitted: Callable[..., Job], folder: Path, broker: Broker, raw: redis_py.Redis
) -> None:
    job = submitted()
    raw.delete(*raw.keys(f"embed:job:{job.id}*"))
    aged(folder)
    shard = files(folder)[0].parent
    (shard / "notes.txt").symlink_to(folder / "nowhere")
    locked = shard / f"0.{'0' * 16}"
    locked.mkdir()  # it can't be unlinked
    data = broker.chunk_files
    with pytest.raises(ChunkFilesUnavailable):
        data.remove_names([f"{path.relative_to(shard.parents[3])}" for path in (locked, *files(folder)[:1])])
    assert len(files(folder)) == CHUNKS - 1
    assert swept(broker, raw) == CHUNKS - 1


def test_a_folder_that_can_not_be_read_does_not_end_the_sweep(
    submitted: Callable[..., Job], folder: Path, broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in (jobs := [submitted(), submitted()]):
        raw.delete(*raw.keys(f"embed:job:{job.id}*"))
    aged(folder)
    first = min(job.id for job in jobs)
    names = Place.names

    def refused(self: Place, name: str) -> Any:
        if name.endswith(f"{first}/in"):
            raise PermissionError(13, "Permission denied", name)
        return names(self, name)

    monkeypatch.setattr(Place, "names", refused)
    assert swept(broker, raw) == CHUNKS
    assert all(first in str(path) for path in files(folder))


@pytest.mark.parametrize("behind_s", [-86400.0, 86400.0])
def test_the_age_of_bytes_is_by_the_clock_of_the_place(
    submitted: Callable[..., Job],
    folder: Path,
    broker: Broker,
    raw: redis_py.Redis,
    monkeypatch: pytest.MonkeyPatch,
    behind_s: float,
) -> None:
    modified = place_module._modified
    monkeypatch.setattr(place_module, "_modified", lambda facts: modified(facts) - behind_s)
    job = submitted()
    raw.delete(*raw.keys(f"embed:job:{job.id}*"))
    assert swept(broker, raw) == 0
    aged(folder)
    assert swept(broker, raw) == CHUNKS


def test_nothing_is_swept_where_the_age_of_bytes_is_unknown(
    submitted: Callable[..., Job], folder: Path, broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place_module._modified({"name": "x", "updated": "2026-11-23T00:00:00Z"}) == math.inf
    job = submitted()
    raw.delete(*raw.keys(f"embed:job:{job.id}*"))
    monkeypatch.setattr(place_module, "_modified", lambda _: math.inf)
    assert swept(broker, raw) == 0


def test_a_second_look_saves_what_redis_refers_to_again(
    submitted: Callable[..., Job], rig: Rig, folder: Path, broker: Broker, raw: redis_py.Redis
) -> None:
    job = submitted()
    aged(folder)
    key = keys.chunk_input(job.id, 0)
    value = cast(bytes, raw.get(key))
    raw.delete(key)
    one = sweeper(broker)
    assert one.round() == 0
    raw.set(key, value)  # Redis came back without its last second
    raw.delete(keys.SWEEP)
    assert one.round() == 0
    run_all(rig, job)
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_another_database_at_the_same_place_loses_nothing(
    submitted: Callable[..., Job], settings: Settings, rig: Rig, folder: Path, own_redis: RedisServer
) -> None:
    job = submitted()
    aged(folder)
    other = Broker.connect(settings.replace(redis_url=own_redis.url))
    client = redis_py.Redis.from_url(own_redis.url)
    assert swept(other, client) == 0
    client.close()
    other.close()
    run_all(rig, job)
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_one_process_sweeps_at_a_time_and_the_next_goes_on_where_it_stopped(
    submitted: Callable[..., Job], folder: Path, broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [submitted() for _ in range(3)]
    for job in jobs:
        raw.delete(*raw.keys(f"embed:job:{job.id}*"))
    aged(folder)
    monkeypatch.setattr("embedctl.sweeper.BUDGET_S", 0.0)
    slow = Sweeper(broker, rest_s=600, again_s=0)
    removed = slow.round()
    assert slow.round() == CHUNKS  # what it found itself; the turn is taken
    assert slow.round() == 0
    for _ in range(3):
        raw.delete(keys.SWEEP)
        removed += slow.round()
    assert removed + CHUNKS + slow.round() >= 3 * CHUNKS
    assert not files(folder)


def test_text_that_waits_outside_counts_as_waiting(submitted: Callable[..., Job], folder: Path) -> None:
    job = submitted()
    assert job.status().waiting_bytes == sum(path.stat().st_size for path in files(folder, "in"))
