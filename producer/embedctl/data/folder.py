"""A folder that all machines share, or that of a single machine, as a store of bytes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from embedctl.data.files import Files
from embedctl.data.planes import Entry
from embedctl_config.durable import sync_folder


class LocalFiles(Files):
    """Files below a folder, which `write_first` makes if its parent exists.

    A share that is not mounted looks like an empty folder: the caller makes sure that it is not. If we make the folder,
    it is private. What is in it follows the umask, because machines may use it as different users.

    Bytes are written under their final name at once: nobody looks for a name before it is noted in Redis.
    """

    may_be_another: ClassVar[bool] = True

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str, payload: bytes) -> None:
        path = self._root / name
        try:
            descriptor = _created(path)
        except FileNotFoundError:  # also if the sweeper removed the empty folder just now
            if not self._root.is_dir():
                raise  # a share may come back in its place
            self._make(path.parent)
            descriptor = _created(path)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(payload)
                stream.flush()
                os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise
        sync_folder(path.parent)

    def write_first(self, name: str, payload: bytes) -> None:
        self._make(self._root)
        fresh = f"{name}.{secrets.token_hex(8)}"
        self.write(fresh, payload)
        try:
            os.link(self._root / fresh, self._root / name)  # whole, or not at all
            sync_folder(self._root)
        except FileExistsError:
            raise
        except OSError:  # some file systems have no hard links
            self.write(name, payload)
        finally:
            self.remove([fresh])

    def read(self, name: str, size: int | None = None) -> bytes:
        with (self._root / name).open("rb") as stream:
            return stream.read(-1 if size is None else size)

    def remove(self, names: Sequence[str]) -> None:
        refused: OSError | None = None
        for name in names:
            try:
                (self._root / name).unlink(missing_ok=True)
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused

    def names(self, folder: str) -> Sequence[Entry]:
        try:
            with os.scandir(self._root / folder) as found:
                entries = [entry for each in found if (entry := _entry(folder, each)) is not None]
        except FileNotFoundError:
            return []
        return sorted(entries, key=lambda each: each.name)

    def remove_empty(self, folder: str) -> None:
        with suppress(OSError):
            (self._root / folder).rmdir()

    def _make(self, folder: Path) -> None:
        """Make a folder and those above it, up to the root, and make their names durable."""
        missing = [folder]
        while missing[-1] != self._root and not missing[-1].parent.is_dir():
            missing.append(missing[-1].parent)
        for each in reversed(missing):
            with suppress(FileExistsError):
                each.mkdir(mode=0o700 if each == self._root else 0o777)
            sync_folder(each.parent)


def _entry(folder: str, found: os.DirEntry[str]) -> Entry | None:
    """What a listing says of a name; None if it is gone by now."""
    try:
        facts = found.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    name = f"{folder}/{found.name}" if folder else found.name
    return Entry(name, found.is_dir(follow_symlinks=False), facts.st_mtime)


def _created(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
