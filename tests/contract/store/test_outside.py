"""Jobs whose chunks' bytes are outside of Redis: what goes wrong there costs no vector, and nothing stays for ever."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from redis import Redis

from embedctl import Job, JobLost, JobState, enqueue_embeddings
from embedctl.chunk_files import ChunkFiles, Where
from embedctl.chunk_files import place as place_module
from embedctl.chunk_files.chunks import GRACE_S
from embedctl.chunk_files.place import Place
from embedctl.chunk_files.references import parse_reference
from embedctl.operating.doctor import Level, examine
from embedctl.queueing.broker import Broker
from embedctl.queueing.sweeper import Sweeper
from embedctl_config import keys
from embedctl_config.errors import ChunkFilesUnavailable, SettingsError
from embedctl_config.settings import Settings
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.chunk_place import Forgetful
from tests.support.jobs import reference
from tests.support.limits import limited
from tests.support.redis_server import RedisServer
from tests.support.rig import Rig
from tests.support.store import assert_from_now, audited, some

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


@dataclass
class Outside:
    settings: Settings
    broker: Broker
    raw: Redis
    folder: Path

    def __post_init__(self) -> None:
        self.rig = Rig(self.broker, self.settings, DummyBackend(dim=16))

    def submit(self, texts: list[str] = TEXTS, **options: Any) -> Job:
        return enqueue_embeddings(texts, settings=self.settings, chunk_size=SIZE, **options)

    def run(self, job: Job) -> None:
        for chunk in range(job.status().chunks):
            self.rig.run(job, chunk)

    def files(self, kind: str = "*", chunk: int | None = None) -> list[Path]:
        name = "*" if chunk is None else f"{chunk}.*"
        return sorted(path for path in self.folder.glob(f"*/*/*/{kind}/*/{name}") if path.is_file())

    def unmount(self) -> None:
        self.folder.rename(self.folder.with_name("away"))

    def mount(self) -> None:
        self.folder.with_name("away").rename(self.folder)

    def expire(self, *jobs: Job) -> None:
        for job in jobs:
            self.raw.delete(*self.raw.keys(f"embed:job:{job.id}*"))

    def age(self) -> None:
        for path in self.files():
            os.utime(path, (time.time() - 2 * GRACE_S,) * 2)

    def swept(self) -> int:
        """A whole sweep, with both looks; returns how many names were removed."""
        one = Sweeper(self.broker, rest_s=0, again_s=0)
        self.raw.delete(keys.SWEEP)
        return one.round() + one.round()

    def assert_complete(self, job: Job) -> None:
        """Encode what is not yet encoded. Then the job must have the vectors of its texts."""
        self.run(job)
        np.testing.assert_array_equal(job.vectors(), reference(TEXTS))

    def assert_repaired(self, job: Job) -> None:
        """Submit the corpus again. Then every record but the one that fails must have its vector."""
        self.submit(SOME_FAIL, idempotency_key="one")
        self.run(job)
        assert counts_of(job) == (JobState.COMPLETED_WITH_ERRORS, 39, 1)
        np.testing.assert_array_equal(np.delete(job.vectors(), 33, 0), np.delete(reference(SOME_FAIL), 33, 0))


@pytest.fixture
def outside(settings: Settings, broker: Broker, raw: Redis, folder: Path) -> Outside:
    return Outside(settings, broker, raw, folder)


def counts_of(job: Job) -> tuple[JobState, int, int]:
    status = job.status()
    return status.state, status.done, status.failed


def test_redis_holds_no_byte_of_a_text_or_a_vector(outside: Outside) -> None:
    job = outside.submit()
    assert len(outside.files("in")) == CHUNKS
    assert job.status().waiting_bytes == sum(path.stat().st_size for path in outside.files("in"))
    assert all(outside.raw.strlen(keys.chunk_input(job.id, chunk)) < 200 for chunk in range(CHUNKS))
    outside.run(job)
    status = job.status()
    assert (status.state, status.waiting_bytes) == (JobState.COMPLETED, 0)
    assert all(outside.raw.strlen(keys.chunk_result(job.id, chunk)) < 200 for chunk in range(CHUNKS))
    assert status.result_bytes == sum(path.stat().st_size for path in outside.files("out"))
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_job_of_a_producer_without_chunk_files_stays_in_redis(outside: Outside) -> None:
    job = enqueue_embeddings(TEXTS, settings=outside.settings.replace(chunk_files=""))
    outside.rig.run(job)
    assert not outside.folder.exists()
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_a_worker_that_does_not_know_the_place_gives_the_chunk_back_and_says_so(outside: Outside) -> None:
    job = outside.submit()
    broker = Broker.connect(outside.settings.replace(chunk_files=""))
    Rig(broker, outside.settings, DummyBackend(dim=16)).run(job)
    assert "set chunk_files to what the job's producer has" in (job.status().trouble or "")
    assert job.status().done == 0
    broker.close()
    outside.raw.zadd(keys.ready(job.id), {"0": 1}, xx=True)  # its pause is over
    outside.assert_complete(job)


def test_a_producer_that_does_not_know_the_place_is_told(outside: Outside) -> None:
    job = outside.submit(idempotency_key="one")
    unknowing = outside.settings.replace(chunk_files="")
    with pytest.raises(SettingsError, match=f"{job.id} keeps its chunks outside of Redis"):
        enqueue_embeddings(TEXTS, settings=unknowing, chunk_size=SIZE, idempotency_key="one")


def test_resuming_a_job_puts_nothing_twice(outside: Outside) -> None:
    job = outside.submit(idempotency_key="one")
    outside.rig.run(job, 0)
    before = outside.files()
    assert outside.submit(idempotency_key="one").id == job.id
    assert outside.files() == before


@pytest.mark.parametrize(
    ("kind", "damaged", "told"),
    [
        ("in", None, "gone from chunk_files"),
        ("in", lambda data: b"EMBC", "damaged"),
        ("out", None, "is gone from chunk_files"),
        ("out", lambda data: b"", "is damaged"),
        ("out", lambda data: data[:-1] + b"!", "is damaged"),
    ],
)
def test_damage_is_repaired(outside: Outside, kind: str, damaged: Callable[[bytes], bytes] | None, told: str) -> None:
    job = outside.submit(SOME_FAIL, idempotency_key="one")
    if kind == "out":
        outside.run(job)
    (victim,) = outside.files(kind, 2)
    data = victim.read_bytes()
    victim.unlink()
    if damaged is not None:
        victim.write_bytes(damaged(data))
    if kind == "in":
        for _ in range(2):  # only a second verdict counts
            outside.rig.run(job, 2)
        assert told in (job.status().trouble or "")
    else:
        with pytest.raises(JobLost, match=rf"chunk 2 of job {job.id}.* {told}: .*--resume {job.id}"):
            job.vectors()
    outside.assert_repaired(job)


@pytest.mark.parametrize("kind", ["in", "*"])
def test_a_chunk_whose_failed_records_are_gone_is_counted_right_and_can_be_retried(outside: Outside, kind: str) -> None:
    job = outside.submit(SOME_FAIL, idempotency_key="one")
    outside.run(job)
    for path in outside.files(kind, CHUNKS - 1):
        path.unlink()
    outside.assert_repaired(job)
    assert job.retry_failed() == 1
    outside.rig.run(job, CHUNKS)
    assert counts_of(job) == (JobState.COMPLETED_WITH_ERRORS, 39, 1)


def test_a_retry_whose_text_is_gone_is_repaired_by_the_corpus(outside: Outside, tmp_path: Path) -> None:
    job = outside.submit(SOME_FAIL, idempotency_key="one")
    outside.run(job)
    job.deliver(str(tmp_path / "parts"))
    assert job.retry_failed() == 1
    moved = some(parse_reference(cast(bytes, outside.raw.get(keys.chunk_input(job.id, CHUNKS)))))
    (outside.folder / moved.name).unlink()
    for _ in range(3):  # two verdicts, and a claim that finds nothing
        outside.rig.run(job, CHUNKS)
    assert "gone from chunk_files" in (job.status().trouble or "")
    audited(outside.broker, job.id)
    assert job.status().lost_chunks == (CHUNKS, CHUNKS)
    outside.assert_repaired(job)
    assert (job.status().waiting_bytes, job.status().lost_chunks) == (0, None)


def test_another_place_at_the_address_of_this_one_is_not_taken_for_it(outside: Outside) -> None:
    job = outside.submit()
    value = cast(bytes, outside.raw.get(keys.chunk_input(job.id, 1)))
    assert outside.rig.broker.chunk_files.get(value)
    outside.unmount()
    ChunkFiles(outside.settings.chunk_files, notes=Forgetful()).make_place()
    with pytest.raises(ChunkFilesUnavailable, match="is now another place than it was"):
        outside.rig.broker.chunk_files.get(value)
    with pytest.raises(ChunkFilesUnavailable, match="is now another place than it was"):
        outside.rig.broker.chunk_files.put(Where(job.id, "out", 1), b"x" * 100)


@pytest.mark.parametrize("is_mountpoint", [False, True])
def test_a_new_producer_makes_no_second_place_while_the_folder_is_away(outside: Outside, is_mountpoint: bool) -> None:
    outside.submit()
    outside.unmount()
    if is_mountpoint:
        outside.folder.mkdir()
    broker = Broker.connect(outside.settings)
    with pytest.raises(ChunkFilesUnavailable, match=r"held chunks as place .* is the folder mounted here"):
        broker.chunk_files.make_place()
    broker.close()
    assert not list(outside.folder.glob("*"))


def test_a_worker_holds_its_vectors_while_the_place_is_away(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    job = outside.submit()
    put, puts = outside.rig.broker.chunk_files.put, []

    def often_away(where: Any, payload: bytes) -> bytes:
        puts.append(where)
        if len(puts) < 3:
            raise ChunkFilesUnavailable("chunk_files is away")
        return put(where, payload)

    monkeypatch.setattr(outside.rig.broker.chunk_files, "put", often_away)
    outside.rig.run(job, 0)
    assert (len(puts), job.status().done) == (3, SIZE)


def test_a_place_that_stays_away_is_told_in_the_status(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    job = outside.submit()
    monkeypatch.setattr("embedctl_config.retry.RETRY_S", 0.2)
    outside.unmount()
    outside.rig.run(job, 0)
    assert "holds no embedctl-chunks.json" in (job.status().trouble or "")


def test_a_producer_waits_for_the_place(outside: Outside) -> None:
    def texts() -> Any:
        yield from TEXTS[:20]
        outside.unmount()
        yield from TEXTS[20:]

    def progress(_: int, waiting_for: str) -> None:
        if waiting_for == "chunk_files":
            outside.mount()

    job = enqueue_embeddings(texts(), settings=outside.settings, chunk_size=SIZE, progress=progress)
    outside.assert_complete(job)


def test_a_job_is_drained_as_any_other(outside: Outside, tmp_path: Path) -> None:
    job = outside.submit()
    outside.run(job)
    job.deliver(str(tmp_path / "parts"))
    assert job.status().result_bytes == 0
    assert len(outside.files("out")) == CHUNKS  # a Redis without its last second refers to them again
    outside.age()
    assert outside.swept() == 2 * CHUNKS
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


def test_the_sweeper_removes_what_nobody_needs_and_nothing_else(outside: Outside) -> None:
    waits, runs = outside.submit(), outside.submit(SOME_FAIL)
    outside.run(runs)
    assert runs.retry_failed() == 1  # the failed record's text moves to another chunk, and keeps its name
    lost = outside.files("out")[0].read_bytes()
    loser = outside.files("out")[0].with_name(f"0.{'f' * 16}")
    loser.write_bytes(lost)
    strange = loser.with_name("notes.txt")
    strange.write_text("not ours")
    assert outside.swept() == 0  # all of it is young
    outside.age()
    kept_text = some(parse_reference(cast(bytes, outside.raw.get(keys.chunk_input(runs.id, CHUNKS)))))
    gone = {each for each in outside.files("in") if runs.id in str(each)} - {outside.folder / kept_text.name}
    before = set(outside.files())
    assert outside.swept() == len(gone) + 1
    assert before - set(outside.files()) == gone | {loser}
    assert strange.exists()
    outside.rig.run(runs, CHUNKS)
    outside.assert_complete(waits)


def test_the_bytes_of_jobs_that_are_gone_are_removed_with_their_folders(outside: Outside) -> None:
    discarded, lapsed, cancelled = outside.submit(), outside.submit(), outside.submit()
    discarded.discard()
    assert not [path for path in outside.files() if discarded.id in str(path)]
    cancelled.cancel()
    outside.expire(lapsed)
    assert not [path for path in outside.files() if cancelled.id in str(path)]
    outside.age()
    assert outside.swept() == CHUNKS
    outside.swept()
    assert [path.name for path in outside.folder.rglob("*") if path.is_file()] == ["embedctl-chunks.json"]
    assert not list(outside.folder.glob("*/*"))


def test_one_name_that_can_not_be_looked_at_or_removed_keeps_no_other_one(outside: Outside) -> None:
    outside.expire(outside.submit())
    outside.age()
    shard = outside.files()[0].parent
    (shard / "notes.txt").symlink_to(outside.folder / "nowhere")
    locked = shard / f"0.{'0' * 16}"
    locked.mkdir()  # it can't be unlinked
    data = outside.broker.chunk_files
    with pytest.raises(ChunkFilesUnavailable):
        data.remove_names([f"{path.relative_to(shard.parents[3])}" for path in (locked, *outside.files()[:1])])
    assert len(outside.files()) == CHUNKS - 1
    assert outside.swept() == CHUNKS - 1


def test_an_unreadable_folder_does_not_end_the_sweep(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [outside.submit(), outside.submit()]
    outside.expire(*jobs)
    outside.age()
    first = min(job.id for job in jobs)
    names = Place.names

    def refused(self: Place, name: str) -> Any:
        if name.endswith(f"{first}/in"):
            raise PermissionError(13, "Permission denied", name)
        return names(self, name)

    monkeypatch.setattr(Place, "names", refused)
    assert outside.swept() == CHUNKS
    assert all(first in str(path) for path in outside.files())


@pytest.mark.parametrize(("ahead_s", "swept"), [(-86400.0, CHUNKS), (86400.0, CHUNKS), (math.inf, 0)])
def test_age_is_by_the_places_own_clock_and_nothing_is_swept_where_it_is_unknown(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, ahead_s: float, swept: int
) -> None:
    modified = place_module._modified
    assert modified({"name": "x", "updated": "2026-11-23T00:00:00Z"}) == math.inf
    monkeypatch.setattr(place_module, "_modified", lambda facts: modified(facts) + ahead_s)
    outside.expire(outside.submit())
    assert outside.swept() == 0
    outside.age()
    assert outside.swept() == swept


def test_a_sweep_resumes_where_a_process_stopped_and_rests_after_its_end(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedctl.queueing.sweeper.BUDGET_S", -1.0)  # a round has time for one folder
    outside.expire(outside.submit(), outside.submit())
    outside.age()
    first, second = sorted({"/".join(path.parts[-5:-1]) for path in outside.files()})

    def looked_at() -> list[str]:
        outside.raw.delete(keys.SWEEP)
        one = Sweeper(outside.broker)
        one.round()
        return [folder for _, folder, _ in one._found]

    began_ms = outside.broker.connection.now_ms()
    assert [looked_at() for _ in range(4)] == [[first], [second], [], []]
    noted_ms = int(cast(bytes, outside.raw.hget(keys.NOTES, "data_next_ms")))
    assert_from_now(outside.broker, noted_ms, after_s=600, since_ms=began_ms)
    outside.raw.hset(keys.NOTES, "data_next_ms", began_ms)
    assert looked_at() == [first]


def test_a_second_look_saves_what_redis_refers_to_again(outside: Outside) -> None:
    job = outside.submit()
    outside.age()
    key = keys.chunk_input(job.id, 0)
    value = cast(bytes, outside.raw.get(key))
    outside.raw.delete(key)
    one = Sweeper(outside.broker, rest_s=0, again_s=0)
    assert one.round() == 0
    outside.raw.set(key, value)  # Redis came back without its last second
    outside.raw.delete(keys.SWEEP)
    assert one.round() == 0
    outside.assert_complete(job)


@pytest.mark.in_redis
@pytest.mark.parametrize(
    ("place", "level", "said"), [("data", Level.OK, "put and got in"), ("not/mounted", Level.FAIL, "not/mounted")]
)
def test_the_doctor_tries_the_place(settings: Settings, tmp_path: Path, place: str, level: Level, said: str) -> None:
    found = examine(settings.replace(chunk_files=str(tmp_path / place)))
    (finding,) = (each for each in found if each.subject == "chunk_files")
    assert (finding.level, said in finding.found) == (level, True)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ["embedctl-chunks.json"] * (level is Level.OK)


def test_another_database_at_the_same_place_loses_nothing(outside: Outside, own_redis: RedisServer) -> None:
    job = outside.submit()
    outside.age()
    other = Broker.connect(outside.settings.replace(redis_url=own_redis.url))
    sweeper = Sweeper(other, rest_s=0, again_s=0)
    assert (sweeper.round(), sweeper.round()) == (0, 0)
    other.close()
    outside.assert_complete(job)
