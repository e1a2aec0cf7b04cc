"""Nothing that a promise hangs on waits for the disk: names are synced in their folder, after what they name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from embedctl.destinations.jsonl import JsonlWriter
from embedctl.destinations.npy import NpyWriter
from embedctl.destinations.parquet import ParquetWriter
from embedctl.destinations.writer import Content
from embedctl.operating import local
from embedctl_config import durable
from tests.support.result_chunks import result_chunk, unit_vectors


class Disk:
    """Notes what is synced, renamed and removed, by name and in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        really, replace, unlink = os.fsync, Path.replace, Path.unlink

        def fsync(descriptor: int) -> None:
            self.seen.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
            really(descriptor)

        def renamed(path: Path, target: Path) -> Path:
            self.seen.append(("rename", target.name))
            return replace(path, target)

        def removed(path: Path, missing_ok: bool = False) -> None:
            unlink(path, missing_ok)
            self.seen.append(("remove", path.name))

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "replace", renamed)
        monkeypatch.setattr(Path, "unlink", removed)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("kind", [NpyWriter, JsonlWriter, ParquetWriter])
def test_each_written_file_is_synced_and_then_its_folder(
    kind: type[NpyWriter | JsonlWriter | ParquetWriter], disk: Disk, tmp_path: Path
) -> None:
    writer = kind(Content(tmp_path / "v.npy", 4))
    writer.write(result_chunk(unit_vectors(4, 8), failed=[1]))
    written = writer.finish()
    for path in written:
        at = disk.seen.index(("rename", path.name))
        assert disk.seen[at - 1 : at + 2] == [
            ("sync", f".{path.name}.part"),
            ("rename", path.name),
            ("sync", tmp_path.name),
        ]


def test_the_word_that_tells_two_machines_apart_lasts(disk: Disk, tmp_path: Path) -> None:
    assert local.token_of(tmp_path) == local.token_of(tmp_path) != ""
    scratch = disk.seen[0][1]
    assert scratch.startswith(".token.")
    assert disk.seen[:3] == [("sync", scratch), ("rename", "token"), ("sync", tmp_path.name)]


@pytest.mark.parametrize(("number", "is_told"), [(errno.EINVAL, False), (errno.EACCES, False), (errno.EIO, True)])
def test_only_failing_disks_matter(number: int, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(number, "no")
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    writer = JsonlWriter(Content(tmp_path / "v.jsonl", 1))
    writer.write(result_chunk(unit_vectors(1, 2)))
    if is_told:
        with pytest.raises(OSError, match="no"):
            writer.finish()
    else:
        writer.finish()
    assert (tmp_path / "v.jsonl").exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_name_that_is_taken_may_be_kept(has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*paths: Path) -> None:
        raise OSError(errno.EPERM, "no")

    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "fresh").write_text("first")
    durable.publish(tmp_path / "fresh", tmp_path / "part", replace=False)
    (tmp_path / "fresh").write_text("second")
    with pytest.raises(FileExistsError):
        durable.publish(tmp_path / "fresh", tmp_path / "part", replace=False)
    assert (tmp_path / "part").read_text() == "first"
    durable.publish(tmp_path / "fresh", tmp_path / "part")
    assert (tmp_path / "part").read_text() == "second"
