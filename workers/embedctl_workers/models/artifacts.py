"""Artefacts: folders that hold what was built from a model. One that is not what its manifest says is built again.

A folder is `artifacts/FINGERPRINT-KIND-KEY` in the cache. It is written under a lock in a scratch folder beside it and
renamed when it is complete, so it is never found incomplete. It may be copied to another machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedctl_config import durable
from embedctl_config.errors import ModelError
from embedctl_workers.models.cache import distrusted, keep, locked, make_readable, private_folder

log = logging.getLogger(__name__)

#: Changes when older folders must no longer be used.
FORMAT = 1
MANIFEST = "manifest.json"
_EXPECTED = {"fingerprint", "recipe", "model", "engine", "graph"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model of an artefact, and in `recipe` everything else that decides its contents, `kind` included."""

    fingerprint: str
    recipe: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name of its folder."""
        key = hashlib.sha256(json.dumps([FORMAT, dict(self.recipe)], sort_keys=True).encode()).hexdigest()
        return f"{self.fingerprint}-{self.recipe['kind']}-{key[:12]}"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A folder whose files are those of its manifest."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(facts["size"] for facts in self.manifest["files"].values())


class ArtifactStore:
    """The artefacts in one cache folder."""

    def __init__(self, cache: Path) -> None:
        self._root = cache / "artifacts"

    def find(self, wanted: Wanted) -> Artifact | None:
        """An artefact, checked byte by byte; None if there is none that can be trusted."""
        folder = self._root / wanted.name
        if not folder.exists():
            return None
        try:
            artifact = read_artifact(folder)
        except ModelError as error:
            log.warning("not used: %s", error)
            return None
        if (artifact.manifest["fingerprint"], artifact.manifest["recipe"]) != (wanted.fingerprint, dict(wanted.recipe)):
            log.warning("not used: %s was built of something else", folder)
            return None
        return artifact

    def build(self, wanted: Wanted, fill: Callable[[Path], Mapping[str, Any]], *, force: bool = False) -> Artifact:
        """Build an artefact, unless another process has done so meanwhile. One that can't be trusted is replaced.

        `fill` writes the files into a folder, and returns what else the manifest is to say; what it raises is raised.
        `force` replaces the artefact even if it can be trusted. A ModelError if it can't be written.
        """
        try:
            private_folder(self._root)
            with locked(self._root / wanted.name):
                found = None if force else self.find(wanted)
                return found or self._fill(wanted, fill)
        except OSError as error:
            raise ModelError(f"an artefact can't be written to {self._root}: {error}") from error

    def all(self) -> Iterator[tuple[Path, Artifact | ModelError]]:
        """Every folder in the store, with its artefact or the reason why it can't be trusted."""
        folders = self._root.iterdir() if self._root.is_dir() else ()
        for folder in sorted(path for path in folders if path.is_dir() and not path.name.startswith(".")):
            try:
                yield folder, read_artifact(folder)
            except ModelError as error:
                yield folder, error

    def _fill(self, wanted: Wanted, fill: Callable[[Path], Mapping[str, Any]]) -> Artifact:
        # The name is the artefact's, so a process that holds its lock may remove what a killed build left.
        for left in self._root.glob(f".{wanted.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(dir=self._root, prefix=f".{wanted.name}.", suffix=".tmp"))
        try:
            fresh = scratch / "fresh"
            fresh.mkdir(mode=0o755)
            facts = fill(fresh)
            for path in fresh.iterdir():
                make_readable(path)
            files = {path.name: _describe(path) for path in sorted(fresh.iterdir())}
            manifest = {
                "format": FORMAT,
                "fingerprint": wanted.fingerprint,
                "recipe": dict(wanted.recipe),
                **facts,
                "files": files,
            }
            text = json.dumps(manifest, indent=2, ensure_ascii=False)
            keep(fresh / MANIFEST, text.encode())
            folder = self._root / wanted.name
            if folder.exists():
                folder.rename(scratch / "replaced")
            durable.publish(fresh, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return read_artifact(folder)


def read_artifact(folder: Path) -> Artifact:
    """Read a folder and check every byte of it.

    A ModelError if it is no artefact of this version, a file is not what its manifest says, or others can write to it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        problem = _problem(folder, manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{folder} is damaged: {error!r}"
    if problem:
        raise ModelError(problem)
    return Artifact(folder, manifest)


def _problem(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Why a folder can't be trusted, or None. A KeyError names what its manifest lacks."""
    if manifest["format"] != FORMAT:
        return f"{folder} is of format {manifest['format']}, and this version reads {FORMAT}"
    files = dict(manifest["files"])
    for path in (folder, folder / MANIFEST, *(folder / name for name in files)):
        if wrong := distrusted(path):
            return f"{path} is not trusted: {wrong}"
    for name, facts in files.items():
        if Path(name).name != name or _describe(folder / name) != facts:
            return f"{folder / name} is not the file that was built"
    if missing := _EXPECTED - set(manifest):
        return f"{folder / MANIFEST} lacks {', '.join(sorted(missing))}"
    return None


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
