"""Built folders: whole or not there, and never used where something about them is wrong."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embedctl_config.errors import ModelError
from embedctl_workers.models.artifacts import FORMAT, MANIFEST, Artifact, ArtifactStore, read_artifact
from tests.support.artifacts import MINE, Fill
from tests.support.waiting import PATIENCE_S, eventually


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


@pytest.fixture
def built(store: ArtifactStore) -> Artifact:
    return store.build(MINE, Fill())


def test_what_was_built_is_found(store: ArtifactStore, built: Artifact) -> None:
    found = store.find(MINE)
    assert found == built
    assert found.folder.name.startswith(f"{MINE.fingerprint}-onnx-")
    assert found.manifest["format"] == FORMAT
    assert found.manifest["fingerprint"] == MINE.fingerprint
    assert found.manifest["recipe"] == MINE.recipe
    assert found.manifest["engine"] == "an engine"
    assert found.manifest["files"]["model.onnx"]["size"] == len(b"weights")
    assert found.size == len(b"weights") + len("{}")
    assert [each for _, each in store.all()] == [built]


def test_what_is_there_is_not_built_again_unless_it_must_be(store: ArtifactStore, built: Artifact) -> None:
    fill = Fill(b"others")
    assert store.build(MINE, fill) == built
    assert fill.calls == 0
    forced = store.build(MINE, fill, force=True)
    assert fill.calls == 1
    assert (forced.folder / "model.onnx").read_bytes() == b"others"
    assert store.find(MINE) == forced


def change(folder: Path, **changes: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.onnx"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def cut_the_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:-20])


def name_a_file_outside(folder: Path) -> None:
    (folder.parent / "outside").write_text("{}")
    files = json.loads((folder / MANIFEST).read_text())["files"]
    change(folder, files={**files, "../outside": files["tokenizer.json"]})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped": (flip_a_bit, "is not the file that was built"),
    "a file cut off": (lambda folder: os.truncate(folder / "model.onnx", 3), "is not the file that was built"),
    "the manifest gone": (lambda folder: (folder / MANIFEST).unlink(), "is damaged"),
    "the manifest cut off": (cut_the_manifest, "is damaged"),
    "the manifest empty": (lambda folder: (folder / MANIFEST).write_text("{}"), "is damaged"),
    "a fact missing": (lambda folder: (folder / MANIFEST).write_text('{"format": 1, "files": {}}'), "lacks engine"),
    "another format": (lambda folder: change(folder, format=FORMAT + 1), "this version reads"),
    "another fingerprint": (lambda folder: change(folder, fingerprint="cd" * 32), "built of something else"),
    "a file outside": (name_a_file_outside, "is not the file that was built"),
    "a folder for all": (lambda folder: folder.chmod(0o777), "can be written to by"),
    "a file for the group": (lambda folder: (folder / "model.onnx").chmod(0o664), "can be written to by"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_folder_with_anything_wrong_is_never_used_and_built_again(
    store: ArtifactStore,
    built: Artifact,
    damage: Callable[[Path], object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(built.folder)
    assert store.find(MINE) is None
    assert reason in caplog.text
    fill = Fill(b"fresh")
    fresh = store.build(MINE, fill)
    assert fill.calls == 1
    assert (fresh.folder / "model.onnx").read_bytes() == b"fresh"
    assert store.find(MINE) == fresh


def test_a_listing_says_what_is_wrong(store: ArtifactStore, built: Artifact) -> None:
    flip_a_bit(built.folder)
    ((folder, problem),) = store.all()
    assert folder == built.folder
    assert isinstance(problem, ModelError)
    with pytest.raises(ModelError, match="is not the file that was built"):
        read_artifact(folder)


class Building:
    """Builds in a thread, which locks as a process does; the build ends once it may go on."""

    def __init__(self, store: ArtifactStore) -> None:
        self.begun, self.go, self.filled = threading.Event(), threading.Event(), Fill(b"whole")
        self.found: Artifact | None = None
        self.thread = threading.Thread(target=self._run, args=(store,))
        self.thread.start()

    def _run(self, store: ArtifactStore) -> None:
        self.found = store.build(MINE, self._fill)

    def _fill(self, folder: Path) -> dict[str, Any]:
        (folder / "model.onnx").write_bytes(b"half")
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        return self.filled(folder)


def test_of_two_that_build_at_once_one_does(store: ArtifactStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = Building(store)
    assert first.begun.wait(PATIENCE_S)
    assert store.find(MINE) is None
    second = Building(store)
    eventually(lambda: "another process builds" in caplog.text)
    first.go.set()
    for each in (first, second):
        each.thread.join(PATIENCE_S)
    assert first.found == second.found == store.find(MINE)
    assert (first.filled.calls, second.filled.calls) == (1, 0)


def test_what_a_killed_build_left_is_cleared_away(store: ArtifactStore, caplog: pytest.LogCaptureFixture) -> None:
    def killed(folder: Path) -> dict[str, Any]:
        (folder / "model.onnx").write_bytes(b"half")
        os._exit(9)

    child = multiprocessing.get_context("fork").Process(target=store.build, args=(MINE, killed))
    child.start()
    child.join()
    assert child.exitcode == 9
    caplog.set_level(logging.INFO)
    built = store.build(MINE, Fill())
    assert "waiting" not in caplog.text
    assert [path for path in built.folder.parent.iterdir() if path.is_dir()] == [built.folder]
