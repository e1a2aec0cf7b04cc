"""What is read from the cache is this user's, and nobody else could have put it there."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from embedctl_config.errors import ModelError
from embedctl_config.hardware import HardwareClass
from embedctl_config.outputs import PLAIN
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import ArtifactStore
from embedctl_workers.models.cache import distrusted, keep, private_folder
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import TEXTS
from embedctl_workers.models.references import _load, references_path
from embedctl_workers.models.tuning import Tuned, load_tuned, save_tuned
from tests.support.artifacts import MINE, Fill

FILES = ModelFiles("a/model", Path("/models/a"), "ab" * 32)
TUNED = Tuned(workers=1, threads=1, cpus=1, tokens_per_s=1.0)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    return folder


def everybody_may_write_to(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def somebody_elses(path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to give a file away")
    os.chown(path, 65534, -1)


SPOILED = {
    everybody_may_write_to: "can be written to by everyone (mode ",
    somebody_elses: "belongs to user 65534, and this is user ",
}
SAVED: dict[str, Callable[[Path], Path]] = {
    "references": lambda cache: _save_references(cache),
    "tuned": lambda cache: save_tuned(TUNED, HardwareClass(), FILES.fingerprint, cache),
    "artefact": lambda cache: ArtifactStore(cache).build(MINE, Fill()).folder,
    "a file of an artefact": lambda cache: ArtifactStore(cache).build(MINE, Fill()).folder / "model.onnx",
}


def _save_references(cache: Path) -> Path:
    path = references_path(FILES, Host(1, cache))
    vectors = np.zeros((len(TEXTS), 3), np.float32)
    file = io.BytesIO()
    np.savez(file, plain=vectors, prompted=vectors)
    keep(path, file.getvalue())
    return path


def _found(kind: str, cache: Path) -> object:
    if kind == "references":
        return _load(references_path(FILES, Host(1, cache)), PLAIN)
    if kind == "tuned":
        return load_tuned(HardwareClass(), FILES.fingerprint, cache)
    return ArtifactStore(cache).find(MINE)


@pytest.mark.parametrize(("spoil", "said"), SPOILED.items())
@pytest.mark.parametrize("kind", list(SAVED))
def test_what_somebody_else_may_have_written_is_not_read(
    kind: str, spoil: Callable[[Path], None], said: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = SAVED[kind](cache)
    assert _found(kind, cache) is not None
    with caplog.at_level(logging.WARNING):
        spoil(path)
        assert _found(kind, cache) is None
    assert f"{path} {said}" in caplog.text


@pytest.mark.parametrize("before", [None, b"before"])
@pytest.mark.parametrize("step", ["os.fdopen", "os.fsync", "os.chmod", "os.replace", "os.unlink"])
def test_a_kill_leaves_the_previous_file_or_none(step: str, before: bytes | None, cache: Path) -> None:
    path = cache / "kept"
    if before is not None:
        keep(path, before)

    def killed() -> None:
        os.umask(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, lambda *args, **options: os._exit(9))
            keep(path, b"after")

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join()
    assert child.exitcode == 9
    expected = b"after" if step == "os.unlink" else before  # that one comes after the rename
    assert (path.read_bytes() if path.exists() else None) == expected
    assert not [each for each in cache.iterdir() if distrusted(each)]
    keep(path, b"again")
    assert path.read_bytes() == b"again"


@pytest.mark.parametrize("exists", [True, False])
def test_a_planted_link_is_replaced_and_its_target_is_not_touched(exists: bool, tmp_path: Path, cache: Path) -> None:
    target = tmp_path / "target"
    if exists:
        target.write_bytes(b"precious")
    (cache / "kept").symlink_to(target)
    keep(cache / "kept", b"data")
    assert not (cache / "kept").is_symlink()
    assert (cache / "kept").read_bytes() == b"data"
    assert (target.read_bytes() if target.exists() else None) == (b"precious" if exists else None)


def a_groups(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


@pytest.mark.parametrize("spoil", [a_groups, somebody_elses, everybody_may_write_to])
def test_who_may_swap_a_folder_above_may_swap_what_is_in_it(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    above = tmp_path / "above"
    cache = above / "between" / "cache"
    SAVED["tuned"](cache)
    assert _found("tuned", cache) is not None
    spoil(above)
    assert _found("tuned", cache) is None
    with pytest.raises(ModelError, match=f"replace them: {above} (belongs|can be)"):
        save_tuned(TUNED, HardwareClass(), FILES.fingerprint, cache)
    with pytest.raises(ModelError, match=f"replace them: {above} (belongs|can be)"):
        ArtifactStore(cache).build(MINE, Fill())


MINE_IN_THERE, NOBODYS = 1000, 65534
#: What is wrong with a mounted folder and the one above it, as owner, group and mode; and who the worker is.
MOUNTS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int], int]] = {
    "a host's folder, to root in a container": ((0, 0, 0o755), (1000, 1000, 0o755), 0),
    "and its user's group may write to it": ((0, 0, 0o755), (1000, 1000, 0o775), 0),
    "a volume of a group": ((0, 0, 0o755), (0, 2000, 0o2775), MINE_IN_THERE),
    "a volume for everybody": ((0, 0, 0o755), (0, 0, 0o777), MINE_IN_THERE),
    "one's own, with a wide umask": ((0, 0, 0o755), (1000, 1000, 0o775), MINE_IN_THERE),
    "somebody else's, and open": ((0, 0, 0o755), (NOBODYS, NOBODYS, 0o777), MINE_IN_THERE),
    "and so is the one above": ((NOBODYS, 0, 0o775), (NOBODYS, NOBODYS, 0o777), MINE_IN_THERE),
}


@pytest.fixture
def mount() -> Iterator[Path]:
    """A folder with a space in its name in one that every user can reach."""
    above = Path(tempfile.mkdtemp())  # pytest's own folders are root's alone
    try:
        (above / "a mount").mkdir()
        yield above / "a mount"
    finally:
        shutil.rmtree(above)


@pytest.mark.parametrize("setup", MOUNTS)
def test_the_commands_that_are_told_mend_it_at_once(setup: str, mount: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to give folders away")
    above, itself, worker = MOUNTS[setup]
    for path, (owner, group, mode) in ((mount.parent, above), (mount, itself)):
        os.chown(path, owner, group)
        path.chmod(mode)
    told = _private_folder_as(worker, mount / "references")
    reason = "belongs to user" if itself[0] not in (0, worker) else "can be written to by"
    assert f"{mount} {reason}" in told
    assert "EMBEDCTL_CACHE_DIR" in told
    by_root = worker and itself[0] != worker
    commands = told.partition(" (as root): " if by_root else "To repair it: ")[2].partition(". Or set")[0]
    whoever = {} if by_root or not worker else {"user": worker}
    subprocess.run(["/bin/sh", "-c", commands], check=True, **whoever)  # type: ignore[call-overload]
    assert _private_folder_as(worker, mount / "references") == ""
    assert _private_folder_as(worker, mount / "artifacts") == ""


def _private_folder_as(user: int, folder: Path) -> str:
    """What is said to a worker of that user, in group 2000 too; empty where all is well."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        told = b"?"
        try:
            if user:
                os.setgroups([2000])
                os.setgid(user)
                os.setuid(user)
            private_folder(folder)
            (folder / "file").write_text("kept")
            told = b""
        except BaseException as error:  # noqa: BLE001  (of a child that must not run pytest's own end)
            told = str(error).encode()
        finally:
            os.write(writing, told)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told = stream.read()
    os.waitpid(child, 0)
    return told.decode()


def test_a_link_on_the_way_is_its_owners_to_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    assert not distrusted(link)
    folder = private_folder(link / "below")
    assert not distrusted(folder)
    if os.geteuid():
        pytest.skip("needs root, to give a link away")
    os.chown(link, 65534, -1, follow_symlinks=False)
    assert distrusted(folder)
    assert distrusted(link)


@pytest.mark.parametrize(("uid_map", "trusted"), [("0 0 4294967295\n", False), ("1000 1000 1\n", True), ("?", False)])
def test_root_may_be_shown_as_nobody_where_it_is_not_mapped(
    uid_map: str, trusted: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Apptainer, where `/` belongs to nobody."""
    somebody_elses(tmp_path)
    (tmp_path / "uid_map").write_text(uid_map)
    monkeypatch.setattr("embedctl_workers.models.cache._UID_MAP", tmp_path / "uid_map")
    assert (not distrusted(cache)) is trusted


def test_a_lock_that_is_a_link_is_not_followed(cache: Path) -> None:
    precious = cache / "precious"
    precious.write_text("precious")
    artifacts = private_folder(cache / "artifacts")
    (artifacts / f".{MINE.name}.lock").symlink_to(precious)
    with pytest.raises(ModelError, match="can't be written"):
        ArtifactStore(cache).build(MINE, Fill())
    (artifacts / f".{MINE.name}.lock").unlink()
    (artifacts / f".{MINE.name}.lock").write_text("kept")
    ArtifactStore(cache).build(MINE, Fill())
    assert precious.read_text() == "precious"
    assert (artifacts / f".{MINE.name}.lock").read_text() == "kept"


@pytest.mark.parametrize("kind", list(SAVED))
def test_a_wide_umask_does_no_harm(kind: str, cache: Path) -> None:
    before = os.umask(0)
    try:
        path = SAVED[kind](cache)
    finally:
        os.umask(before)
    assert not distrusted(path)
    assert _found(kind, cache) is not None
