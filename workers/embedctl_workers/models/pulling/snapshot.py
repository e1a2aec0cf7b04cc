"""A model in the hub's cache, in the layout that the hub's own client reads.

`blobs/DIGEST` holds contents, `snapshots/COMMIT/NAME` links to them, and `refs/REVISION` names a commit. A blob takes
its name when its contents are checked, a snapshot appears with all of its links at once, and the revision is noted
last. So a process that is killed between any two steps leaves nothing that others would take for the model.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

from embedctl_config import durable
from embedctl_config.errors import ModelError
from embedctl_workers.models.cache import locked
from embedctl_workers.models.pulling.hub import HubFile, Listing

_COMMIT = re.compile(r"[0-9a-f]{40}")
#: The ending of a file that is not whole. The hub's client uses other ones.
_PART = ".embedctl.incomplete"
_SHA256_DIGITS = 64


class Snapshots:
    """The snapshots of one repository in a hub's cache folder; an OSError if that can't be written."""

    def __init__(self, cache: Path, repository: str) -> None:
        name = f"models--{repository.replace('/', '--')}"
        self.folder = cache / name
        self._locks = cache / ".locks" / name

    @contextmanager
    def locked(self, doing: str) -> Iterator[None]:
        """Keep other processes of this machine from downloading the same model."""
        self._locks.mkdir(parents=True, exist_ok=True)
        with locked(self._locks / "pull", doing):
            yield

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision was when it was last downloaded, by whatever program; None if it never was."""
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            noted = self._ref(revision).read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return noted if _COMMIT.fullmatch(noted) else None

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit, which may not exist."""
        return self.folder / "snapshots" / commit

    def blob(self, file: HubFile) -> Path:
        """Where the contents of a file stand; they may not be there."""
        return self.folder / "blobs" / file.digest

    def part(self, file: HubFile) -> Path:
        """Where a file stands that is not whole; its folder is made."""
        blob = self.blob(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        return blob.with_name(blob.name + _PART)

    def accept(self, file: HubFile) -> None:
        durable.publish(self.part(file), self.blob(file))

    def link(self, listing: Listing, names: Iterable[str]) -> Path:
        """Make the snapshot of a commit, or add what it lacks; its folder."""
        final = self.snapshot(listing.commit)
        fresh = self.folder / f".embedctl-{listing.commit}"
        shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
        target = final if final.exists() else fresh
        for name in names:
            self._link(target, listing.files[name])
        if target is fresh:
            final.parent.mkdir(exist_ok=True)
            durable.publish(fresh, final)
        return final

    def note(self, revision: str, commit: str) -> None:
        """Let a branch or tag mean this commit. Parts of files that nobody will ask for again are removed."""
        if revision != commit:
            ref = self._ref(revision)
            ref.parent.mkdir(parents=True, exist_ok=True)
            durable.write(ref, commit.encode())
        for part in (self.folder / "blobs").glob(f"*{_PART}"):
            part.unlink(missing_ok=True)

    def _ref(self, revision: str) -> Path:
        return self.folder / "refs" / revision

    def _link(self, snapshot: Path, file: HubFile) -> None:
        path = snapshot / file.name
        leads_there = path.is_symlink() and path.readlink().name == self.blob(file).name
        if path.exists() and (leads_there or digest_of(path, file) == file.digest):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        up = PurePosixPath(*[".."] * (2 + len(PurePosixPath(file.name).parents) - 1))
        try:
            path.symlink_to(up / "blobs" / file.digest)
        except OSError:  # a file system without links
            shutil.copyfile(self.blob(file), path)


def digest_of(path: Path, file: HubFile) -> str:
    """A digest of a file's contents, of the kind that the hub lists for it; ModelError if they can't be read."""
    try:
        # Git names a blob by the sha1 of its size and contents.
        head = f"blob {path.stat().st_size}\0".encode()
        kind = "sha256" if len(file.digest) == _SHA256_DIGITS else partial(hashlib.sha1, head, usedforsecurity=False)
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, kind).hexdigest()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error}") from error
