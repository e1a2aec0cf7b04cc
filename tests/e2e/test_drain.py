"""Draining: results leave Redis for durable parts in a folder or a bucket, whatever dies between any two steps."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import numpy as np
import pytest
import redis as redis_py
from moto.s3.exceptions import S3ClientError
from moto.s3.responses import S3Response

from embedctl import ChunkVectors, Job, JobDrained, JobFailed, JobHeld, OutputError, enqueue_embeddings
from embedctl.cli.run import _freed_unless_resumable
from embedctl.destinations.files import fetch
from embedctl.destinations.place import PartsBucket
from embedctl.store import Drains
from embedctl_config import durable, keys
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings
from tests.support.drained_parts import manifest_of, results_in_redis, rows_of, unlocked, write_corpus
from tests.support.failpoints import full_disk, killed_at
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.limits import limited
from tests.support.rig import TEXTS_OF_13_CHUNKS as TEXTS
from tests.support.rig import Encode, Rig
from tests.support.waiting import eventually

CHUNKS = 13


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return limited(settings.replace(lease_s=30.0), part_records=20)


@pytest.fixture
def job(encode: Encode) -> Job:
    """An ended job of :data:`TEXTS`, whose results are in Redis."""
    return encode()


def assert_complete(folder: Path, texts: Sequence[str] = TEXTS) -> None:
    """Every record is once in the parts, with its vector."""
    rows = rows_of(folder)
    assert sorted(rows) == list(range(len(texts)))
    vectors = np.array([rows[position]["embedding"] for position in range(len(texts))], np.float32)
    np.testing.assert_array_equal(vectors, reference(texts))
    assert manifest_of(folder)["records"] == len(texts)


def test_results_go_to_parts_and_are_read_from_there(encode: Encode, tmp_path: Path) -> None:
    """A kept field's column becomes wider in the middle of a part, which is then written again."""
    items = [
        {"id": f"r{i}", "text": "" if i in (7, 93) else f"text {i}", "n": i if i < 50 else i + 0.5} for i in range(100)
    ]
    job = encode(items, keep=("n",))
    before = list(job.iter_results())
    files = job.deliver(tmp_path).files
    names = [f"part-{number:06d}.parquet" for number in range(5)]
    assert [Path(name).name for name in files] == [*names, "manifest.json"]
    assert results_in_redis(job) == set()
    for old, new in zip(before, job.iter_results(), strict=True):
        assert (old.ids, old.errors, old.kept) == (new.ids, new.errors, new.kept)
        np.testing.assert_array_equal(old.vectors, new.vectors)
    assert [chunk.positions[0] for chunk in job.iter_results(start=11)] == [88, 96]
    assert [each.position for each in job.errors()] == [7, 93]
    assert job.status().result_bytes == 0
    rows = rows_of(tmp_path)
    assert rows[7]["embedding"] is None
    assert (rows[93]["error_code"], rows[93]["id"], rows[93]["n"]) == ("empty", "r93", 93.5)
    assert job.deliver(tmp_path).files == files, "once more, when there is nothing left to do"


@pytest.mark.parametrize(("part_records", "at_once"), [(20, False), (1, True), (100, True)])
def test_retried_records_come_in_a_part_of_their_own(
    encode: Encode, rig: Rig, settings: Settings, tmp_path: Path, part_records: int, at_once: bool
) -> None:
    """Those of a retry of a retry too, also if nobody has drained the first one."""
    job = encode(["" if i in (7, 93) else text for i, text in enumerate(TEXTS)])
    job.deliver(tmp_path)
    own = Job.get(job.id, limited(settings, part_records=part_records))
    for number, first in enumerate((13, 15), start=1):
        assert job.retry_failed() == 2
        rig.run_all(job, (first, first + 1))
        if not at_once:
            files = [Path(name).name for name in own.deliver(tmp_path).files]
            assert files[-2:] == [f"part-retry-{number:06d}.parquet", "manifest.json"]
            assert [each.position for each in job.errors()] == [7, 93]
    own.deliver(tmp_path)
    status = own.status()
    assert (status.drained_chunks, status.chunks, status.result_bytes) == (17, 17, 0)
    assert [each.position for each in own.errors()] == [7, 93]
    assert sorted(rows_of(tmp_path)) == list(range(100))
    assert own.vectors().shape == (100, 16)


def test_a_power_cut_before_the_sync_loses_nothing(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the folder is synced, a power cut may take the new name away. Then the results must still be in Redis."""
    folder = tmp_path / "out"
    folder.mkdir()
    unlinked_before_sync: list[str] = []
    synced: list[set[str]] = []
    real_unlink = Drains.unlink
    monkeypatch.setattr(durable, "sync_folder", lambda path: synced.append({each.name for each in path.iterdir()}))

    def unlink(self: Drains, job_id: str, chunks: Sequence[int]) -> None:
        unlinked_before_sync.extend({each.name for each in folder.glob("part-*")} - synced[-1])
        real_unlink(self, job_id, chunks)

    monkeypatch.setattr(Drains, "unlink", unlink)
    job.deliver(folder)
    assert unlinked_before_sync == []


def test_a_file_that_can_grow_no_more_is_removed(job: Job, tmp_path: Path) -> None:
    """The disk refuses in the middle of a part: pyarrow writes the bytes, and then fails to close the file, too."""
    with full_disk(1000), pytest.raises(OutputError, match=r"File too large.*the same command resumes"):
        job.deliver(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(results_in_redis(job)) == CHUNKS
    job.deliver(tmp_path)
    assert_complete(tmp_path)


def test_a_disk_that_is_full_when_a_part_is_synced_unlinks_nothing(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=[None, None, None, *[full] * 100]))
        with pytest.raises(OutputError, match=r"No space left on device.*still in Redis; the same command resumes"):
            job.deliver(tmp_path)
    assert results_in_redis(job) == set(range(3, CHUNKS))
    assert not list(tmp_path.glob(".*.part")), "the space of the unfinished part is free"
    job.deliver(tmp_path)
    assert_complete(tmp_path)


# --------------------------------------------------------------------------------------------------------- other hands


def drained_half(job: Job, folder: Path) -> None:
    with killed_at(Drains, "unlink", 2, after=True):
        job.deliver(folder)


@pytest.mark.parametrize("how", ["changed", "removed"])
def test_a_part_that_was_touched_is_named_and_nothing_more_is_unlinked(job: Job, tmp_path: Path, how: str) -> None:
    drained_half(job, tmp_path)
    part = tmp_path / "part-000001.parquet"
    good, before = part.read_bytes(), results_in_redis(job)
    if how == "changed":
        part.write_bytes(good[:-9] + b"x" + good[-8:])
    else:
        part.unlink()
    words = "was changed after" if how == "changed" else "does not hold part-000001.parquet"
    with pytest.raises(OutputError, match=f"{words}.*the same command resumes. Nothing more was"):
        job.deliver(tmp_path)
    assert results_in_redis(job) == before
    part.write_bytes(good)
    job.deliver(tmp_path)
    assert_complete(tmp_path)


def test_the_folder_may_be_moved_and_another_is_refused(job: Job, tmp_path: Path) -> None:
    drained_half(job, tmp_path / "a")
    with pytest.raises(OutputError, match=f"{tmp_path}/b does not hold .* which was drained to {tmp_path}/a"):
        job.deliver(tmp_path / "b")
    (tmp_path / "b" / "note.txt").write_text("mine")
    for path in (tmp_path / "a").iterdir():
        path.rename(tmp_path / "b" / path.name)
    job.deliver(tmp_path / "b")
    assert_complete(tmp_path / "b")
    assert job.status().drained_to == str(tmp_path / "b")


def test_a_second_drainer_is_refused(job: Job, tmp_path: Path) -> None:
    refused: list[bool] = []

    def second(_: object) -> None:
        with pytest.raises(JobHeld, match=f"is being drained by process {os.getpid()} on "):
            Job(job.id, job._broker).deliver(tmp_path)
        refused.append(True)

    job.deliver(tmp_path, written=second)
    assert refused
    assert_complete(tmp_path)


def test_a_job_that_is_cancelled_keeps_its_parts(job: Job, tmp_path: Path) -> None:
    drained_half(job, tmp_path)
    job.cancel()
    job.discard()
    assert set(rows_of(tmp_path)) == set(range(48))


def test_a_folder_with_parts_of_another_job_is_refused(encode: Encode, tmp_path: Path) -> None:
    first, second = encode(), encode()
    first.deliver(tmp_path)
    with pytest.raises(OutputError, match=f"holds manifest.json of job {first.id}: choose another folder"):
        second.deliver(tmp_path)
    assert_complete(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(OutputError, match=f"holds part-000000.parquet of job {first.id}"):
        second.deliver(tmp_path)


def test_a_part_that_another_job_published_meanwhile_is_left_alone(encode: Encode, tmp_path: Path) -> None:
    """Two jobs are drained into one place by two machines, which no lock keeps apart."""
    first, second = encode(), encode()

    def other(chunk: ChunkVectors) -> None:
        if chunk.positions[0] == 16:
            with unlocked(tmp_path):
                second.deliver(tmp_path)

    with pytest.raises((OutputError, JobHeld)):
        first.deliver(tmp_path, written=other)
    assert set(rows_of(tmp_path)) == set(range(100))
    assert manifest_of(tmp_path)["job"] == second.id
    first.deliver(tmp_path / "own")
    assert_complete(tmp_path / "own")


def test_leftovers_of_a_redis_that_went_back_are_replaced(job: Job, raw: redis_py.Redis, tmp_path: Path) -> None:
    """Redis came back without its last writes: parts lie there that it does not know of."""
    snapshot = {key: raw.dump(key) or b"" for key in raw.scan_iter(f"*{job.id}*")}
    job.deliver(tmp_path)
    (tmp_path / "part-000009.parquet").write_bytes((tmp_path / "part-000000.parquet").read_bytes())
    (tmp_path / "manifest.json").unlink()
    raw.delete(*raw.scan_iter(f"*{job.id}*"))
    for key, data in snapshot.items():
        raw.restore(key, 10**7, data)
    job.deliver(tmp_path)
    assert_complete(tmp_path)


def test_a_run_frees_no_job_that_a_fetch_drains(job: Job, tmp_path: Path) -> None:
    def run(chunk: ChunkVectors) -> None:
        if chunk.positions[0] == 0:
            with pytest.raises(JobHeld), _freed_unless_resumable(Job(job.id, job._broker), resumable=True):
                Job(job.id, job._broker).deliver(tmp_path / "other")

    job.deliver(tmp_path, written=run)
    assert_complete(tmp_path)


def test_a_run_frees_no_job_that_was_drained_to_where_it_can_not_read(job: Job, tmp_path: Path) -> None:
    job.deliver(tmp_path / "parts")
    (tmp_path / "parts").rename(tmp_path / "elsewhere")
    told = rf"were drained to {tmp_path}/parts, and part-000000.parquet can't be read there from here"
    with pytest.raises(JobDrained, match=told), _freed_unless_resumable(job, resumable=True):
        fetch(job, tmp_path / "v.npy")
    (tmp_path / "elsewhere").rename(tmp_path / "parts")
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


@pytest.mark.parametrize("at", [0, 16])
def test_a_drainer_that_stood_still_replaces_no_parts(job: Job, raw: redis_py.Redis, tmp_path: Path, at: int) -> None:
    """It was stopped for so long that another one took over, on another machine: no lock of the folder keeps it out."""
    copy = Job(job.id, job._broker)

    def overtaken(chunk: ChunkVectors) -> None:
        if chunk.positions[0] == at and not raw.hexists(keys.job(job.id), "parts"):
            raw.delete(keys.drainer(job.id))
            with unlocked(tmp_path):
                copy.deliver(tmp_path)

    with pytest.raises(JobHeld, match="by another process, while this one stood still"):
        job.deliver(tmp_path, written=overtaken)
    assert_complete(tmp_path)


# -------------------------------------------------------------------------------------------------------- the commands


SMALL = {"LIMIT_PART_RECORDS": "500", "LIMIT_RESULTS_HIGH_WATER_BYTES": "40000", "LIMIT_HIGH_WATER_BYTES": "20000"}


@pytest.mark.parametrize("way", [("-o", "v.npy"), ("-o", "-")], ids=" ".join)
def test_a_file_does_not_drain(here: Here, way: tuple[str, str]) -> None:
    write_corpus(here.folder, 3)
    done = here.embedctl("submit", "c.jsonl", "--drain", *way, status=2)
    assert "--drain is for vectors that go into a folder or a database" in done.stderr


def test_a_job_that_waits_for_its_reader_says_so(here: Here) -> None:
    texts = write_corpus(here.folder, 1000)
    here.start_worker()
    submitted = here.embedctl(
        *("submit", "c.jsonl", "--drain", "--chunk-size", "50"), **{**SMALL, "LIMIT_HIGH_WATER_BYTES": "1000000"}
    )
    job_id = submitted.stdout.strip()

    def said() -> str:
        return here.embedctl("status", job_id).stdout

    eventually(lambda: "waiting for a reader" in said(), what="the job's pause")
    assert f"embedctl fetch {job_id} -o DIR/" in said()
    here.embedctl("fetch", job_id, "-o", "out/", **SMALL, status=0)
    assert "waiting for a reader" not in said()
    assert_complete(here.folder / "out", texts)


def test_what_an_error_budget_left_is_drained_before_the_command_fails(
    settings: Settings, rig: Rig, tmp_path: Path
) -> None:
    texts = ["" if 40 <= at < 44 else text for at, text in enumerate(TEXTS)]
    job = enqueue_embeddings(texts, settings=settings, chunk_size=8, max_errors=2)
    rig.run_all(job, (0, 3, 5))
    with pytest.raises(JobFailed, match=r"error budget after 4 failed records.*What is done is in"):
        job.deliver(tmp_path)
    assert results_in_redis(job) == set()
    rows = rows_of(tmp_path)
    assert sorted(rows) == [row for chunk in (0, 3, 5) for row in range(8 * chunk, 8 * chunk + 8)]


def test_a_stopped_job_is_drained_and_goes_on(settings: Settings, rig: Rig, tmp_path: Path) -> None:
    """What was done when it was stopped is in the parts, and its holes are filled once its corpus continues it."""
    job = enqueue_embeddings(TEXTS, settings=settings, chunk_size=8, idempotency_key="k")
    done = [0, 1, 2, 5, 7]
    rig.run_all(job, done)
    job.stop()
    job.deliver(tmp_path)
    assert results_in_redis(job) == set()
    assert sorted(rows_of(tmp_path)) == [row for chunk in done for row in range(8 * chunk, 8 * chunk + 8)]
    there = ~np.isnan(job.vectors()).any(axis=1)
    assert there.sum() == 8 * len(done)
    again = enqueue_embeddings(TEXTS, settings=settings, chunk_size=8, idempotency_key="k")
    assert again.id == job.id
    rig.run_all(job, set(range(CHUNKS)) - set(done))
    assert job.wait(timeout=60).done == len(TEXTS)
    job.deliver(tmp_path)
    assert_complete(tmp_path)
    np.testing.assert_array_equal(job.vectors(), reference(TEXTS))


PLACE = "s3://vectors/jobs/one/"


# ---------------------------------------------------------------------------------------------------------- a bucket


@pytest.fixture
def bucket(s3: None) -> Iterator[Any]:
    """The bucket `vectors`, without jobs."""
    client = boto3.client("s3")
    yield client
    for each in client.list_objects_v2(Bucket="vectors", Prefix="jobs/").get("Contents", []):
        client.delete_object(Bucket="vectors", Key=each["Key"])


def downloaded(bucket: Any, folder: Path) -> Path:
    """The objects of the job's prefix as files."""
    for each in bucket.list_objects_v2(Bucket="vectors", Prefix="jobs/one/")["Contents"]:
        bucket.download_file("vectors", each["Key"], str(folder / each["Key"].rpartition("/")[2]))
    return folder


def test_results_go_to_a_bucket_and_are_read_from_there(encode: Encode, bucket: Any, tmp_path: Path) -> None:
    job = encode(["" if i == 7 else text for i, text in enumerate(TEXTS)])
    names = job.deliver(PLACE).files
    assert names[0] == "s3://vectors/jobs/one/part-000000.parquet"
    assert names[-1] == "s3://vectors/jobs/one/manifest.json"
    assert results_in_redis(job) == set()
    folder = downloaded(bucket, tmp_path)
    assert manifest_of(folder)["failed"] == 1
    assert sorted(rows_of(folder)) == list(range(100))
    np.testing.assert_array_equal(np.delete(job.vectors(), 7, 0), np.delete(reference(TEXTS), 7, 0))
    assert [each.position for each in job.errors()] == [7]
    assert job.deliver(PLACE).files == names


def test_a_part_that_was_replaced_or_removed_is_named(job: Job, bucket: Any) -> None:
    job.deliver(PLACE)
    key = "jobs/one/part-000002.parquet"
    content = bucket.get_object(Bucket="vectors", Key=key)["Body"].read()
    bucket.put_object(Bucket="vectors", Key=key, Body=content[:-1] + b"x")
    with pytest.raises(OutputError, match=r"part-000002.parquet in s3://vectors/jobs/one/ was changed"):
        job.deliver(PLACE)
    bucket.delete_object(Bucket="vectors", Key=key)
    with pytest.raises(OutputError, match=r"s3://vectors/jobs/one/ does not hold part-000002.parquet"):
        job.deliver(PLACE)
    with pytest.raises(JobDrained, match=r"part-000002.parquet can't be read there"):
        job.vectors()


@pytest.mark.slow
def test_a_bucket_that_refuses_has_nothing_unlinked(job: Job, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match=r"s3://missing/p/ can't be written: .*the same command resumes"):
        job.deliver("s3://missing/p/")
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        patched.setattr("s3fs.S3FileSystem.cachable", False)
        with pytest.raises(OutputError, match=r"can't be written"):
            job.deliver("s3://vectors/jobs/two/")
    assert len(results_in_redis(job)) == CHUNKS
    job.deliver(PLACE)
    assert results_in_redis(job) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "times", "said"),
    [
        (503, "SlowDown", 2, "Please reduce your request rate."),
        (400, "ExpiredToken", 1000, "The provided token has expired."),
    ],
)
def test_a_bucket_that_is_busy_is_asked_again_and_one_that_refuses_is_named(
    job: Job, bucket: Any, monkeypatch: pytest.MonkeyPatch, status: int, code: str, times: int, said: str
) -> None:
    left, real = iter(range(times)), S3Response.put_object

    def put_object(response: S3Response) -> Any:
        if next(left, None) is not None:
            refusal = S3ClientError(code, said)
            refusal.code = status
            raise refusal
        return real(response)

    with monkeypatch.context() as patched:
        patched.setattr(S3Response, "put_object", put_object)
        if times > 2:
            with pytest.raises(OutputError, match=rf"{PLACE} can't be written: {said}.*the same command resumes"):
                job.deliver(PLACE)
            assert len(results_in_redis(job)) == CHUNKS
        else:
            job.deliver(PLACE)
            assert next(left, None) is None, "the store has refused"
    job.deliver(PLACE)
    assert results_in_redis(job) == set()


def test_a_part_under_a_taken_name_is_not_replaced(bucket: Any) -> None:
    place = PartsBucket(PLACE)
    with place.locked():
        for content in (b"first", b"second"):
            place.scratch("part-000000.parquet").write_bytes(content)
            if content == b"first":
                place.publish("part-000000.parquet")
                assert not place.scratch("part-000000.parquet").exists()
        with pytest.raises(FileExistsError):
            place.publish("part-000000.parquet")
        assert place.read("part-000000.parquet") == b"first"
        place.publish("part-000000.parquet", replace=True)
    assert place.read("part-000000.parquet") == b"second"


def test_a_part_that_the_store_damages_is_not_taken_for_durable(
    job: Job, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(PartsBucket, "digest", lambda *_: ("0" * 64, 1))
        with pytest.raises(OutputError, match=r"part-000000.parquet is not what was sent"):
            job.deliver(PLACE)
    assert len(results_in_redis(job)) == CHUNKS
    job.deliver(PLACE)
    assert results_in_redis(job) == set()


def test_other_urls_are_refused() -> None:
    for url in ("gs://bucket/x/", "s3://", "https://host/x/"):
        with pytest.raises(SettingsError, match="parts go to a folder or to s3://BUCKET/PREFIX/"):
            PartsBucket(url)
