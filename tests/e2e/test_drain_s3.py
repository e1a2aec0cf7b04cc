"""Draining to a bucket: a real S3 client and moto's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

from embedctl import ChunkVectors, JobDrained, OutputError
from embedctl.destinations.place import PartsBucket
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings
from tests.support.buckets import s3_server
from tests.support.drained_parts import manifest_of, results_in_redis, rows_of
from tests.support.failpoints import Killed, kill_at
from tests.support.jobs import reference
from tests.support.limits import limited
from tests.support.rig import TEXTS_OF_13_CHUNKS as TEXTS
from tests.support.rig import Encode

CHUNKS = 13
PLACE = "s3://vectors/jobs/one/"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as variables:
        yield variables


@pytest.fixture
def bucket(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket `vectors`, which this process finds as programs find theirs."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    yield client
    for each in client.list_objects_v2(Bucket="vectors").get("Contents", []):
        client.delete_object(Bucket="vectors", Key=each["Key"])


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return limited(settings.replace(lease_s=30.0), part_records=20)


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


@pytest.mark.parametrize("after", [False, True])
def test_a_drain_that_dies_as_it_publishes_a_part_is_resumed(
    encode: Encode, bucket: Any, tmp_path: Path, after: bool
) -> None:
    job = encode()
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, PartsBucket, "publish", 3, after=after)
        with pytest.raises(Killed):
            job.deliver(PLACE)
    job.deliver(PLACE)
    folder = downloaded(bucket, tmp_path)
    manifest_of(folder)
    assert sorted(rows_of(folder)) == list(range(100))
    assert results_in_redis(job) == set()


def test_a_part_that_was_replaced_or_removed_is_named(encode: Encode, bucket: Any) -> None:
    job = encode()
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


def test_a_part_that_another_job_published_meanwhile_is_left_alone(encode: Encode, bucket: Any, tmp_path: Path) -> None:
    first, second = encode(), encode()

    def other(chunk: ChunkVectors) -> None:
        if chunk.positions[0] == 16:
            second.deliver(PLACE)

    with pytest.raises(OutputError, match=f"holds part-000000.parquet of job {second.id}: choose another"):
        first.deliver(PLACE, written=other)
    assert manifest_of(downloaded(bucket, tmp_path))["job"] == second.id
    first.deliver("s3://vectors/jobs/two/")


@pytest.mark.slow
def test_a_bucket_that_refuses_says_so_and_nothing_is_unlinked(
    encode: Encode, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = encode()
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


def test_a_credential_that_expires_half_way_unlinks_nothing_more(
    encode: Encode, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = encode()
    real, calls = PartsBucket.publish, 0

    def expires(self: PartsBucket, name: str, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise PermissionError("The provided token has expired.")
        real(self, name, **options)

    with monkeypatch.context() as patched:
        patched.setattr(PartsBucket, "publish", expires)
        with pytest.raises(OutputError, match=r"token has expired.*the same command resumes"):
            job.deliver(PLACE)
    assert results_in_redis(job) == set(range(6, CHUNKS))
    job.deliver(PLACE)
    assert results_in_redis(job) == set()


def test_a_part_under_a_taken_name_is_not_replaced(bucket: Any) -> None:
    place = PartsBucket(PLACE)
    with place.locked():
        for content in (b"first", b"second"):
            place.scratch("part-000000.parquet").write_bytes(content)
            if content == b"first":
                place.publish("part-000000.parquet")
        with pytest.raises(FileExistsError):
            place.publish("part-000000.parquet")
    assert place.read("part-000000.parquet") == b"first"


def test_other_urls_are_refused() -> None:
    for url in ("gs://bucket/x/", "s3://", "https://host/x/"):
        with pytest.raises(SettingsError, match="parts go to a folder or to s3://BUCKET/PREFIX/"):
            PartsBucket(url)
