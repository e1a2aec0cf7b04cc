"""The folder that takes the parts of one job. A part that is published there survives a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedctl.destinations.digest_rows import digest_of
from embedctl.destinations.place import MANIFEST, Place
from embedctl.destinations.unfinished import locked, part_of
from embedctl_config import durable
from embedctl_config.errors import OutputError


class PartsFolder(Place):
    """A local folder. Every method raises OSError if the disk or the folder refuses.

    Args:
        path: need not exist; its parent folder must.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.name = str(self.path)

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
            durable.sync_folder(self.path.parent)
        with locked(self.path / MANIFEST):
            yield

    def scratch(self, name: str) -> Path:
        return part_of(self.path / name)

    def publish(self, name: str, *, replace: bool = False) -> None:
        # Unless it replaces: a drainer that stood still must not replace the part of the next one.
        durable.publish(self.scratch(name), self.path / name, replace=replace)

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
