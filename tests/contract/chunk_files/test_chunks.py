"""The bytes of chunks are the same ones wherever they are: in Redis, in a folder, in a bucket."""

from __future__ import annotations

import errno
import multiprocessing
import os
import secrets
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from embedctl.chunk_files import ChunkFiles, Upload, Where, chunks
from embedctl.chunk_files import place as place_module
from embedctl.chunk_files.place import Place
from embedctl.chunk_files.references import MOST_BYTES, NAME, parse_reference
from embedctl_config import wire
from embedctl_config.errors import ChunkFilesUnavailable, SettingsError, WireForeign
from embedctl_config.wire import ChunkInput
from tests.support.chunk_place import Forgetful

JOB = "20260101-120000-0123456789"
MARK = "embedctl-chunks.json"


def chunk(size: int, first: int = 0) -> bytes:
    return wire.encode_input(ChunkInput(first, bytes(1), [os.urandom(size)]))


def outside(address: str | Path, inline: int = 0) -> ChunkFiles:
    return ChunkFiles(str(address), inline, Forgetful())


@pytest.fixture(params=["redis", "folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a place; empty for Redis."""
    if request.param == "redis":
        return ""
    return str(tmp_path / "data") if request.param == "folder" else str(request.getfixturevalue("bucket"))


@pytest.fixture
def bucket(s3: None) -> str:
    return f"s3://vectors/team/{secrets.token_hex(4)}"


@pytest.fixture
def files(place: str) -> ChunkFiles:
    made = outside(place)
    made.make_place()
    return made


@pytest.fixture
def folder_files(tmp_path: Path) -> ChunkFiles:
    made = outside(tmp_path / "data")
    made.make_place()
    return made


@pytest.fixture
def beyond(files: ChunkFiles) -> ChunkFiles:
    if not files.is_outside:
        pytest.skip("Redis keeps the bytes itself")
    return files


@pytest.mark.parametrize("size", [0, 5000, 3 * 1024 * 1024])
def test_what_is_put_is_got(files: ChunkFiles, size: int) -> None:
    payload = chunk(size)
    value = files.put(Where(JOB, "in", 7), payload)
    again = files.put(Where(JOB, "in", 7), chunk(9))  # nothing is ever replaced
    assert files.get(value) == payload
    assert files.get(again) != payload
    assert files.get(value, 40) == payload[:40]
    assert files.get(b"void") == b"void"
    # Scripts read these.
    assert wire.digest_of(value) == wire.digest_of(payload)
    assert value[wire.ROWS_AT : wire.ROWS_AT + 4] == payload[wire.ROWS_AT : wire.ROWS_AT + 4]


def test_all_processes_know_the_place(place: str, files: ChunkFiles) -> None:
    other = outside(place)
    assert other.place_id == files.place_id
    value = files.put(Where(JOB, "in", 0), payload := chunk(100))
    assert other.get(value) == payload


def test_a_reference_is_small_and_a_small_chunk_stays_in_redis(place: str, beyond: ChunkFiles) -> None:
    value = beyond.put(Where(JOB, "in", 123_456_789), chunk(100_000))
    assert len(value) <= MOST_BYTES - 64
    reference = parse_reference(value)
    assert reference is not None
    assert (reference.size > 100_000, reference.place) == (True, beyond.place_id)
    small = outside(place, inline=4096)
    assert small.put(Where(JOB, "in", 0), payload := chunk(100)) == payload
    assert parse_reference(small.put(Where(JOB, "in", 0), chunk(5000))) is not None


def test_what_is_deleted_is_gone(beyond: ChunkFiles) -> None:
    values = [beyond.put(Where(JOB, "in", number), chunk(10)) for number in range(3)]
    beyond.delete([values[0], values[2], b"void", values[2]])
    beyond.delete([values[0]])
    assert [beyond.get(value) is None for value in values] == [True, False, True]


def test_folders_can_be_listed_level_by_level(beyond: ChunkFiles) -> None:
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


def test_damaged_bytes_are_told_from_others(folder_files: ChunkFiles, tmp_path: Path) -> None:
    value = folder_files.put(Where(JOB, "in", 0), chunk(100))
    (path,) = (each for each in (tmp_path / "data").rglob("0.*") if each.is_file())
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        with pytest.raises(WireForeign, match=r"0\.[0-9a-f]{16} in chunk_files .* is damaged"):
            folder_files.get(value)


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/etc/passwd", f"17/20260101/{JOB}/in/000000/../../x", "x" * 99]
)
def test_redis_can_not_choose_which_files_are_read_or_removed(tmp_path: Path, name: str) -> None:
    files = outside(tmp_path / "data")
    place_id = files.make_place()
    assert place_id is not None
    payload = chunk(10)
    forged = bytearray(payload[:36])
    forged[4] = 3
    value = bytes(forged) + len(payload).to_bytes(8, "little") + zlib.crc32(payload).to_bytes(4, "little")
    value += bytes.fromhex(place_id) + name.encode()
    for ask in (files.get, lambda each: files.delete([each])):
        with pytest.raises(WireForeign, match="has a name that embedctl never gives"):
            ask(value)


def test_another_place_is_told_from_the_own_one(tmp_path: Path) -> None:
    mine, other = outside(tmp_path / "mine"), outside(tmp_path / "other")
    mine.make_place()
    other.make_place()
    value = mine.put(Where(JOB, "in", 0), chunk(100))
    with pytest.raises(SettingsError, match=r"are at another place than chunk_files .*other: set it to"):
        other.get(value)
    other.delete([value])
    assert mine.get(value) is not None


def test_a_folder_without_a_mark_may_yet_be_mounted(tmp_path: Path) -> None:
    with pytest.raises(ChunkFilesUnavailable, match=r"holds no embedctl-chunks\.json: is the folder mounted here"):
        _ = outside(tmp_path / "elsewhere").place_id


def test_a_part_of_a_bucket_that_no_producer_has_used_is_told(bucket: str) -> None:
    with pytest.raises(SettingsError, match=r"holds no embedctl-chunks\.json: it is not what the producers use"):
        _ = outside(f"{bucket}/elsewhere").place_id


def test_a_folder_that_is_no_longer_mounted_loses_nothing(folder_files: ChunkFiles, tmp_path: Path) -> None:
    value = folder_files.put(Where(JOB, "in", 0), payload := chunk(100))
    (tmp_path / "data").rename(tmp_path / "away")
    for empty in (False, True):
        if empty:
            (tmp_path / "data").mkdir()
        with pytest.raises(ChunkFilesUnavailable, match="is the folder mounted here"):
            folder_files.get(value)
        with pytest.raises(ChunkFilesUnavailable, match="is the folder mounted here"):
            folder_files.put(Where(JOB, "in", 0), payload)
    assert not list((tmp_path / "data").iterdir())
    (tmp_path / "data").rmdir()
    (tmp_path / "away").rename(tmp_path / "data")
    assert folder_files.get(value) == payload


def test_a_full_disk_leaves_no_half(folder_files: ChunkFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(ChunkFilesUnavailable, match=r"can't be used now: .*No space left"):
            folder_files.put(Where(JOB, "in", 0), chunk(100))
    assert not [each for each in (tmp_path / "data").rglob("0.*") if each.is_file()]
    assert folder_files.put(Where(JOB, "in", 0), chunk(100))


def test_what_a_kill_leaves_is_swept(folder_files: ChunkFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(place_module, "publish", lambda fresh, path, *, replace: written.extend((fresh, path)))
    folder_files.put(Where(JOB, "in", 7), chunk(100))
    fresh, path = written
    assert (fresh.parent, path.exists()) == (path.parent, False)
    assert NAME.fullmatch(str(fresh.relative_to(tmp_path / "data")))


@pytest.mark.slow
def test_a_bucket_that_refuses_is_waited_for(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = outside(bucket)
    files.make_place()
    value = files.put(Where(JOB, "in", 0), chunk(100))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    cut_off = outside(bucket)
    cut_off._id = files.place_id
    with pytest.raises(ChunkFilesUnavailable, match="can't be used now"):
        cut_off.get(value)
    with pytest.raises(ChunkFilesUnavailable, match="can't be used now"):
        cut_off.put(Where(JOB, "in", 0), chunk(9))


@pytest.mark.parametrize(("url", "words"), [("chunks", "neither an absolute path nor a URL"), ("nope://x", "nope://")])
def test_a_url_of_no_known_kind_is_refused(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        outside(url).make_place()


def test_two_producers_that_come_first_agree(tmp_path: Path) -> None:
    many = [outside(tmp_path / "data") for _ in range(8)]
    barrier = threading.Barrier(len(many))

    def made(files: ChunkFiles) -> str | None:
        barrier.wait()
        return files.make_place()

    with ThreadPoolExecutor(len(many)) as pool:
        assert len(set(pool.map(made, many))) == 1
    assert [path.name for path in (tmp_path / "data").iterdir()] == [MARK]


def test_a_lost_answer_replaces_no_mark_of_a_bucket(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, theirs = Place._ask, b"of another producer"
    Place(bucket).write_first("mark", theirs)
    asked = 0

    def lost(self: Place, *question: Any, **named: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise OSError("the connection was closed before the answer came")
        return ask(self, *question, **named)

    monkeypatch.setattr(Place, "_ask", lost)
    with pytest.raises(FileExistsError):
        Place(bucket).write_first("mark", b"ours")
    assert Place(bucket).read("mark") == theirs


def test_a_file_system_without_hard_links_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, os.strerror(errno.EPERM))))
    assert outside(tmp_path / "data").make_place() == outside(tmp_path / "data").place_id


def test_a_mark_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text('{"id": "../.."}')
    with pytest.raises(SettingsError, match="can't be read: it is not embedctl's, or damaged"):
        _ = outside(tmp_path).place_id


def test_a_child_of_the_process_uses_it_too(place: str, files: ChunkFiles) -> None:
    value = files.put(Where(JOB, "in", 0), payload := chunk(5000))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put((files.get(value), files.put(Where(JOB, "out", 0), payload))))
    child.start()
    got, put = answers.get()
    child.join()
    assert (got, files.get(put)) == (payload, payload)


def test_bytes_are_put_again_when_they_may_be_swept(folder_files: ChunkFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = Upload(folder_files, Where(JOB, "in", 0), chunk(100))
    first = upload.value()
    assert upload.value() == first
    monkeypatch.setattr(chunks, "_FRESH_S", -1.0)
    assert upload.value() != first


def test_bytes_swept_before_redis_noted_them_are_put_back(beyond: ChunkFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = Upload(beyond, Where(JOB, "in", 0), payload := chunk(100))
    value = upload.value()
    upload.noted()  # they are new: nothing is asked
    beyond.delete([value])
    upload.noted()
    assert beyond.get(value) is None
    monkeypatch.setattr(chunks, "_FRESH_S", -1.0)  # this process was suspended for longer
    upload.noted()
    assert beyond.get(value) == payload
    upload.noted()
    assert beyond.get(value) == payload


def test_machines_that_use_a_share_as_different_users_follow_its_modes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o770)
    before = os.umask(0o007)
    try:
        files = outside(tmp_path / "data")
        files.make_place()
        files.put(Where(JOB, "in", 0), chunk(100))
    finally:
        os.umask(before)
    found = {path.stat().st_mode & 0o777 for path in (tmp_path / "data").rglob("*")}
    assert found == {0o770, 0o660}
