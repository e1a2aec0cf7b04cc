"""The bytes of chunks are the same ones wherever they are: in Redis, in a folder, in a bucket."""

from __future__ import annotations

import errno
import multiprocessing
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from embedctl.data import DataPlane, InRedis, Upload, Where, planes
from embedctl.data.outside import Outside
from embedctl.data.references import MOST_BYTES, parse_reference
from embedctl.data.remote import RemoteFiles
from embedctl_config import wire
from embedctl_config.errors import DataUnavailable, SettingsError, WireForeign
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput
from tests.support.buckets import s3_server

JOB = "20260101-120000-0123456789"
MARK = "embedctl-data.json"

Make = Callable[[], DataPlane]


def chunk(size: int, first: int = 0) -> bytes:
    """An input in wire format of about this size."""
    return wire.encode_input(ChunkInput(first, bytes(1), [os.urandom(size)]))


def outside(url: str | Path, inline: int = 0) -> Outside:
    return Outside(Settings(data_url=str(url), data_inline_bytes=inline), lambda: "17")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield "s3://vectors/team"


@pytest.fixture(params=["redis", "folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store; empty for Redis."""
    if request.param == "redis":
        return ""
    return str(tmp_path / "data") if request.param == "folder" else str(request.getfixturevalue("bucket"))


@pytest.fixture
def bucket(server: str) -> str:
    """A prefix of the bucket that no other test uses."""
    return f"{server}/{secrets.token_hex(4)}"


@pytest.fixture
def plane(place: str) -> DataPlane:
    made = outside(place) if place else InRedis()
    made.made_store()
    return made


@pytest.fixture
def beyond(plane: DataPlane) -> Outside:
    if not isinstance(plane, Outside):
        pytest.skip("Redis keeps the bytes itself")
    return plane


@pytest.mark.parametrize("size", [0, 1, 5000, 3 * 1024 * 1024])
def test_what_is_put_is_got(plane: DataPlane, size: int) -> None:
    payload = chunk(size)
    value = plane.put(Where(JOB, "in", 7), payload)
    assert plane.get(value) == payload
    assert plane.get(value, 40) == payload[:40]


def test_scripts_find_the_digest_and_the_rows_in_the_value(plane: DataPlane) -> None:
    payload = chunk(100)
    value = plane.put(Where(JOB, "in", 7), payload)
    assert wire.digest_of(value) == wire.digest_of(payload)
    assert value[wire.ROWS_AT : wire.ROWS_AT + 4] == payload[wire.ROWS_AT : wire.ROWS_AT + 4]


def test_nothing_is_ever_replaced(plane: DataPlane) -> None:
    first, second = chunk(100), chunk(100)
    values = [plane.put(Where(JOB, "out", 0), each) for each in (first, second, first)]
    assert [plane.get(value) for value in values] == [first, second, first]


def test_a_value_that_is_no_chunk_is_given_back_as_it_is(plane: DataPlane) -> None:
    assert plane.get(b"void") == b"void"


def test_all_processes_know_the_store(place: str, plane: DataPlane) -> None:
    other = outside(place) if place else InRedis()
    assert other.store == plane.store
    value = plane.put(Where(JOB, "in", 0), payload := chunk(100))
    assert other.get(value) == payload


def test_a_reference_is_small(beyond: Outside) -> None:
    value = beyond.put(Where(JOB, "in", 123_456_789), chunk(100_000))
    assert len(value) <= MOST_BYTES - 64
    reference = parse_reference(value)
    assert reference is not None
    assert (reference.size > 100_000, reference.store) == (True, beyond.store)


def test_what_is_deleted_is_gone(beyond: Outside) -> None:
    values = [beyond.put(Where(JOB, "in", number), chunk(10)) for number in range(3)]
    beyond.delete([values[0], values[2], b"void", values[2]])
    beyond.delete([values[0]])
    assert [beyond.get(value) is None for value in values] == [True, False, True]


def test_folders_can_be_listed_level_by_level(beyond: Outside) -> None:
    for number in (1, 2, 501):
        beyond.put(Where(JOB, "in", number), chunk(10))
    (day,) = [each.name for each in beyond.list("") if each.is_folder]
    assert day == JOB[:8]
    assert JOB in [each.name.rpartition("/")[2] for each in beyond.list(day)]
    shards = [each.name for each in beyond.list(f"{day}/{JOB}/in")]
    assert [name.rpartition("/")[2] for name in shards] == ["000000", "000001"]
    found = list(beyond.list(shards[0]))
    assert {each.name.rpartition("/")[2].partition(".")[0] for each in found} >= {"1", "2"}
    assert all(not each.is_folder and each.modified > 1.7e9 for each in found)
    beyond.remove_names([each.name for each in found])
    assert not list(beyond.list(shards[0]))
    assert not list(beyond.list("20000101"))


def test_a_small_chunk_stays_in_redis(place: str, beyond: Outside) -> None:
    small = outside(place, inline=4096)
    assert small.put(Where(JOB, "in", 0), payload := chunk(100)) == payload
    assert small.get(payload) == payload
    assert parse_reference(small.put(Where(JOB, "in", 0), chunk(5000))) is not None


def test_damaged_bytes_are_told_from_others(tmp_path: Path) -> None:
    plane = outside(tmp_path / "data")
    plane.made_store()
    value = plane.put(Where(JOB, "in", 0), chunk(100))
    (path,) = (each for each in (tmp_path / "data").rglob("0.*") if each.is_file())
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        with pytest.raises(WireForeign, match=r"0\.[0-9a-f]{16} in data_url .* is damaged"):
            plane.get(value)


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/etc/passwd", f"17/20260101/{JOB}/in/000000/../../x", "x" * 99]
)
def test_redis_can_not_choose_which_files_are_read_or_removed(tmp_path: Path, name: str) -> None:
    plane = outside(tmp_path / "data")
    store = plane.made_store()
    payload = chunk(10)
    forged = bytearray(payload[:36])
    forged[4] = 3
    value = bytes(forged) + len(payload).to_bytes(8, "little") + zlib.crc32(payload).to_bytes(4, "little")
    value += bytes.fromhex(store) + name.encode()
    for ask in (plane.get, lambda each: plane.delete([each])):
        with pytest.raises(WireForeign, match="has a name that embedctl never gives"):
            ask(value)


def test_a_process_without_the_setting_says_what_to_set(tmp_path: Path) -> None:
    plane = outside(tmp_path / "data")
    plane.made_store()
    value = plane.put(Where(JOB, "in", 0), chunk(100))
    with pytest.raises(SettingsError, match="set data_url to what the job's producer has"):
        InRedis().get(value)


def test_another_store_is_told_from_the_own_one(tmp_path: Path) -> None:
    mine, other = outside(tmp_path / "mine"), outside(tmp_path / "other")
    mine.made_store()
    other.made_store()
    value = mine.put(Where(JOB, "in", 0), chunk(100))
    with pytest.raises(SettingsError, match=r"are in another store than data_url .*other: set it to"):
        other.get(value)
    other.delete([value])
    assert mine.get(value) is not None


def test_a_folder_that_holds_no_store_may_yet_be_mounted(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match=r"holds no embedctl-data\.json: is the folder mounted here"):
        _ = outside(tmp_path / "elsewhere").store


def test_a_part_of_a_bucket_that_no_producer_has_used_is_told(bucket: str) -> None:
    with pytest.raises(SettingsError, match=r"holds no embedctl-data\.json: it is not what the producers use"):
        _ = outside(f"{bucket}/elsewhere").store


def test_a_folder_that_is_no_longer_mounted_loses_nothing(tmp_path: Path) -> None:
    plane = outside(tmp_path / "data")
    plane.made_store()
    value = plane.put(Where(JOB, "in", 0), payload := chunk(100))
    (tmp_path / "data").rename(tmp_path / "away")
    for empty in (False, True):
        if empty:
            (tmp_path / "data").mkdir()
        with pytest.raises(DataUnavailable, match="is the folder mounted here"):
            plane.get(value)
        with pytest.raises(DataUnavailable, match="is the folder mounted here"):
            plane.put(Where(JOB, "in", 0), payload)
    assert not list((tmp_path / "data").iterdir())
    (tmp_path / "data").rmdir()
    (tmp_path / "away").rename(tmp_path / "data")
    assert plane.get(value) == payload


def test_a_full_disk_is_waited_for_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = outside(tmp_path / "data")
    plane.made_store()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataUnavailable, match=r"can't be used now: .*No space left"):
            plane.put(Where(JOB, "in", 0), chunk(100))
    assert not [each for each in (tmp_path / "data").rglob("0.*") if each.is_file()]
    assert plane.put(Where(JOB, "in", 0), chunk(100))


@pytest.mark.slow
def test_a_bucket_that_refuses_is_waited_for(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = outside(bucket)
    plane.made_store()
    value = plane.put(Where(JOB, "in", 0), chunk(100))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    cut_off = outside(bucket)
    cut_off._store = plane.store
    with pytest.raises(DataUnavailable, match="can't be used now"):
        cut_off.get(value)
    with pytest.raises(DataUnavailable, match="can't be used now"):
        cut_off.put(Where(JOB, "in", 0), chunk(9))


def test_a_bucket_that_does_not_exist_is_told(bucket: str) -> None:
    with pytest.raises(DataUnavailable, match="s3://nowhere"):
        outside("s3://nowhere/chunks").made_store()


@pytest.mark.parametrize(("url", "words"), [("chunks", "neither an absolute path nor a URL"), ("nope://x", "nope://")])
def test_a_url_of_no_known_kind_is_refused(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        outside(url).made_store()


def test_two_producers_that_come_first_agree(tmp_path: Path) -> None:
    planes = [outside(tmp_path / "data") for _ in range(8)]
    barrier = threading.Barrier(len(planes))

    def made(plane: Outside) -> str:
        barrier.wait()
        return plane.made_store()

    with ThreadPoolExecutor(len(planes)) as pool:
        assert len(set(pool.map(made, planes))) == 1
    assert [path.name for path in (tmp_path / "data").iterdir()] == [MARK]


def test_a_lost_answer_to_the_first_mark_of_a_bucket_replaces_no_mark(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, theirs = RemoteFiles._ask, b"of another producer"
    RemoteFiles(bucket).write_first("mark", theirs)
    asked = 0

    def lost(self: RemoteFiles, question: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise OSError("the connection was closed before the answer came")
        return ask(self, question)

    monkeypatch.setattr(RemoteFiles, "_ask", lost)
    with pytest.raises(FileExistsError):
        RemoteFiles(bucket).write_first("mark", b"ours")
    assert RemoteFiles(bucket).read("mark") == theirs


def test_a_file_system_without_hard_links_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    assert outside(tmp_path / "data").made_store() == outside(tmp_path / "data").store


def test_machines_that_use_a_share_as_different_users_follow_its_modes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o770)
    before = os.umask(0o007)
    try:
        plane = outside(tmp_path / "data")
        plane.made_store()
        plane.put(Where(JOB, "in", 0), chunk(100))
    finally:
        os.umask(before)
    found = {path.stat().st_mode & 0o777 for path in (tmp_path / "data").rglob("*")}
    assert found == {0o770, 0o660}


def test_a_mark_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text('{"id": "../.."}')
    with pytest.raises(SettingsError, match="can't be read: it is not embedctl's, or damaged"):
        _ = outside(tmp_path).store


def test_a_child_of_the_process_uses_it_too(place: str, plane: DataPlane) -> None:
    value = plane.put(Where(JOB, "in", 0), payload := chunk(5000))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put((plane.get(value), plane.put(Where(JOB, "out", 0), payload))))
    child.start()
    got, put = answers.get()
    child.join()
    assert (got, plane.get(put)) == (payload, payload)


def test_bytes_are_put_once_and_again_only_when_they_may_be_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = outside(tmp_path / "data")
    plane.made_store()
    upload = Upload(plane, Where(JOB, "in", 0), chunk(100))
    first = upload.value()
    assert upload.value() == first
    monkeypatch.setattr(planes, "_FRESH_S", -1.0)
    assert upload.value() != first


def test_bytes_that_were_swept_before_redis_noted_them_are_put_back(
    beyond: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Upload(beyond, Where(JOB, "in", 0), payload := chunk(100))
    value = upload.value()
    upload.noted()  # they are new: nothing is asked
    beyond.delete([value])
    upload.noted()
    assert beyond.get(value) is None
    monkeypatch.setattr(planes, "_FRESH_S", -1.0)  # this process was suspended for longer
    upload.noted()
    assert beyond.get(value) == payload
    upload.noted()
    assert beyond.get(value) == payload
