"""What is read from the cache is this user's, and nobody else could have put it there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embedctl_config.errors import ModelError
from embedctl_config.hardware import HardwareClass
from embedctl_workers.artifacts import ArtifactStore
from embedctl_workers.backends.base import Host
from embedctl_workers.cache import is_trusted, private_folder
from embedctl_workers.gate_texts import TEXTS
from embedctl_workers.models import ModelFiles
from embedctl_workers.references import _load, references_path
from embedctl_workers.tuning import Tuned, load_tuned, save_tuned
from tests.unit.test_artifacts import MINE, Fill

FILES = ModelFiles("a/model", Path("/models/a"), "ab" * 32)
TUNED = Tuned(budgets={1: 512}, workers=1, threads=1, cpus=1, tokens_per_s=1.0)


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


SPOILED = [everybody_may_write_to, somebody_elses]
SAVED: dict[str, Callable[[Path], Path]] = {
    "references": lambda cache: _save_references(cache),
    "tuned": lambda cache: save_tuned(TUNED, HardwareClass(), FILES.fingerprint, cache),
    "artefact": lambda cache: ArtifactStore(cache).build(MINE, Fill()).folder,
    "a file of an artefact": lambda cache: ArtifactStore(cache).build(MINE, Fill()).folder / "model.onnx",
}


def _save_references(cache: Path) -> Path:
    path = references_path(FILES, Host(1, cache))
    private_folder(path.parent)
    vectors = np.zeros((len(TEXTS), 3), np.float32)
    with path.open("wb") as file:
        np.savez(file, plain=vectors, prompted=vectors)
    path.chmod(0o644)
    return path


def _found(kind: str, cache: Path) -> object:
    if kind == "references":
        return _load(references_path(FILES, Host(1, cache)))
    if kind == "tuned":
        return load_tuned(HardwareClass(), FILES.fingerprint, cache)
    return ArtifactStore(cache).find(MINE)


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("kind", list(SAVED))
def test_what_somebody_else_may_have_written_is_not_read(
    kind: str, spoil: Callable[[Path], None], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = SAVED[kind](cache)
    assert _found(kind, cache) is not None
    with caplog.at_level(logging.WARNING):
        spoil(path)
        assert _found(kind, cache) is None
    assert f"{path} belongs to somebody else, or others may write to it" in caplog.text


@pytest.mark.parametrize("kind", list(SAVED))
def test_nothing_is_read_from_below_a_folder_in_which_everybody_may_put_another(kind: str, cache: Path) -> None:
    SAVED[kind](cache)
    cache.chmod(0o777)
    assert _found(kind, cache) is None
    cache.chmod(0o1777)  # as /tmp: only its owner may rename what is there
    assert _found(kind, cache) is not None


def test_nothing_is_made_there_either(cache: Path) -> None:
    cache.chmod(0o777)
    with pytest.raises(ModelError, match=f"but {cache} is not so: chmod go-w {cache}"):
        save_tuned(TUNED, HardwareClass(), FILES.fingerprint, cache)
    with pytest.raises(ModelError, match="chmod go-w"):
        ArtifactStore(cache).build(MINE, Fill())


@pytest.mark.parametrize("kind", ["tuned", "artefact", "a file of an artefact"])
def test_a_wide_umask_does_no_harm(kind: str, cache: Path) -> None:
    before = os.umask(0)
    try:
        path = SAVED[kind](cache)
    finally:
        os.umask(before)
    assert is_trusted(path)
    assert _found(kind, cache) is not None


def a_groups(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


@pytest.mark.parametrize("spoil", [a_groups, somebody_elses, everybody_may_write_to])
@pytest.mark.parametrize("kind", list(SAVED))
def test_who_may_swap_a_folder_above_may_swap_what_is_in_it(
    kind: str, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    above = tmp_path / "above"
    cache = above / "between" / "cache"
    SAVED[kind](cache)
    assert _found(kind, cache) is not None
    spoil(above)
    assert _found(kind, cache) is None
    with pytest.raises(ModelError, match=f"but {above} is not so"):
        private_folder(cache)


def test_a_link_on_the_way_is_its_owners_to_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    assert is_trusted(link)
    folder = private_folder(link / "below")
    assert is_trusted(folder)
    if os.geteuid():
        pytest.skip("needs root, to give a link away")
    os.chown(link, 65534, -1, follow_symlinks=False)
    assert not is_trusted(folder)
    assert not is_trusted(link)


@pytest.mark.parametrize(("uid_map", "trusted"), [("0 0 4294967295\n", False), ("1000 1000 1\n", True), ("?", False)])
def test_root_may_be_shown_as_nobody_where_it_is_not_mapped(
    uid_map: str, trusted: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Apptainer, where `/` belongs to nobody."""
    somebody_elses(tmp_path)
    (tmp_path / "uid_map").write_text(uid_map)
    monkeypatch.setattr("embedctl_workers.cache._UID_MAP", tmp_path / "uid_map")
    assert is_trusted(cache) is trusted


def test_folders_that_are_made_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        private_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)


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


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "a/../../b", ".."])
def test_a_models_name_leads_to_no_other_file(name: str, cache: Path) -> None:
    named = ModelFiles(name, FILES.folder, FILES.fingerprint)
    assert references_path(named, Host(1, cache)) == references_path(FILES, Host(1, cache))
    assert references_path(named, Host(1, cache)).resolve().is_relative_to(cache.resolve())
