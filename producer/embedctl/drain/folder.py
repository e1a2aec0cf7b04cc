"""The folder that takes the parts of one job. A part that is published there survives a power cut."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedctl.drain.places import MANIFEST, Place
from embedctl.output.parts import locked, part_of
from embedctl_config.errors import OutputError

#: Some file systems have no hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)


class PartsFolder(Place):
    """A local folder. Every method raises OSError if the disk or the folder refuses.

    Args:
        path: need not exist; its parent folder must.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def name(self) -> str:
        return str(self.path)

    def check(self) -> None:
        folder = self.path if self.path.exists() else self.path.parent
        if not folder.is_dir():
            raise OutputError(f"{self.path} can't be made: {folder} is no folder")
        if not os.access(folder, os.W_OK):
            raise OutputError(f"{self.path} can't be written: permission denied")

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.check()
        if not self.path.is_dir():
            self.path.mkdir()
            _sync(self.path.parent)
        with locked(self.path / MANIFEST):
            yield

    def scratch(self, name: str) -> Path:
        return part_of(self.path / name)

    def publish(self, name: str, *, replace: bool = False) -> None:
        scratch, final = self.scratch(name), self.path / name
        with scratch.open("rb") as stream:
            os.fsync(stream.fileno())
        if replace:
            scratch.replace(final)
        else:
            _move_exclusively(scratch, final)
        _sync(self.path)

    def digest(self, name: str) -> tuple[str, int]:
        return digest_of(self.path / name)

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def source(self, name: str) -> Path:
        return self.path / name

    def listed(self) -> list[str]:
        return [each.name for each in self.path.iterdir()] if self.path.is_dir() else []

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def digest_of(path: Path) -> tuple[str, int]:
    """The sha256 of a file in hexadecimal, and its size in bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), os.fstat(stream.fileno()).st_size


def _move_exclusively(scratch: Path, final: Path) -> None:
    """Rename a file, unless the name is taken: a drainer that stood still must not replace the part of the next one."""
    try:
        os.link(scratch, final)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if final.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from None
        scratch.replace(final)
    else:
        scratch.unlink()


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
