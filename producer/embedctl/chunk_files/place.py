"""Named bytes below a folder, a bucket or another place that fsspec knows."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from embedctl_config.durable import publish, sync_folder
from embedctl_config.errors import MissingExtra, SettingsError

#: How botocore asks: a store that does not answer must not hold a worker's thread for minutes.
_S3_PATIENCE = {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 2}}
#: Names are removed together, this many at once: the most that S3 takes.
_TOGETHER = 1000
#: The packages whose errors are those of a store.
_OF_STORES = ("botocore", "aiobotocore", "aiohttp", "asyncio", "google", "gcsfs", "azure", "adlfs", "requests")


@dataclass(frozen=True, slots=True)
class Entry:
    """A name below the place, and when it was written, in seconds by the place's clock; infinite if that is unknown."""

    name: str
    is_folder: bool
    modified: float


class Place:
    """Named bytes. A name has parts with slashes between them, and what it holds appears whole or not at all.

    Credentials are found as the URL's own package finds them (`AWS_…`, `~/.aws`). What is in a folder follows the
    umask, because machines may use it as different users. Every method raises OSError if the place refuses or can't be
    reached, SettingsError if fsspec does not know the URL's scheme, and MissingExtra without the package for s3.

    Attributes:
        is_folder: whether it is a folder: another one may stand there for a time, as long as nothing is mounted.

    Args:
        address: an absolute path, or a URL such as `s3://bucket/prefix`; raises SettingsError if it is neither. Nothing
            is opened yet.
    """

    def __init__(self, address: str) -> None:
        scheme, mark, rest = address.partition("://")
        self.is_folder = not mark or scheme == "file"
        self._scheme = "file" if self.is_folder else scheme
        self._root = str(Path(rest if mark else address)) if self.is_folder else rest.strip("/")
        if self.is_folder and not Path(self._root).is_absolute():
            raise SettingsError(
                f"chunk_files {address} is neither an absolute path nor a URL such as s3://BUCKET/PREFIX"
            )
        self._process = 0
        self._files: Any = None

    def write(self, name: str, payload: bytes) -> None:
        """Keep bytes under a name that nobody else writes at this moment; they are durable when this returns.

        A folder is never made in the place of one that is away.
        """
        if self.is_folder:
            self._write_file(name, payload, replace=True)
        else:
            self._ask("pipe_file", self._path(name), payload)

    def write_first(self, name: str, payload: bytes) -> None:
        """The same under a name that others may write at this moment; raises FileExistsError if it is taken.

        The first one wins, where the place can tell. A folder is made if its parent exists, and is private then.
        """
        if self.is_folder:
            _make_folder(Path(self._root), 0o700)
            self._write_file(name, payload, replace=False)
            return
        try:
            self._ask("pipe_file", self._path(name), payload, mode="create")
        except FileExistsError:
            raise
        except (OSError, NotImplementedError, TypeError) as error:
            # Not every store knows `If-None-Match`. Or the answer was lost: what is there must not be replaced then.
            if self._ask("exists", self._path(name)):
                raise FileExistsError(name) from error
            self.write(name, payload)

    def read(self, name: str, size: int | None = None) -> bytes:
        """The bytes under a name, or the first `size` of them; raises FileNotFoundError if there are none."""
        found: bytes = self._ask("cat_file", self._path(name), start=0 if size else None, end=size)
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Remove bytes; names that do not exist are ignored. A name that can't be removed keeps no other one."""
        paths = [self._path(name) for name in names]
        for at in range(0, len(paths), _TOGETHER):
            some = paths[at : at + _TOGETHER]
            try:
                if self.is_folder:  # fsspec would stop at the first one that can't be removed
                    self._remove_each(some)
                else:
                    self._ask("rm", some)
            except FileNotFoundError:
                self._remove_each(some)

    def _remove_each(self, paths: Sequence[str]) -> None:
        refused: OSError | None = None
        for path in paths:
            try:
                self._ask("rm_file", path)
            except FileNotFoundError:
                pass
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused

    def names(self, folder: str) -> Sequence[Entry]:
        """What is directly in a folder, sorted by name; nothing if it does not exist."""
        try:
            found = self._ask("ls", self._path(folder), detail=True, refresh=True)
        except FileNotFoundError:
            return []
        own = len(self._root) + 1
        entries = [
            Entry(each["name"].rstrip("/")[own:], each["type"] == "directory", _modified(each))
            for each in found
            if each["name"].rstrip("/") != self._path(folder)
        ]
        return sorted(entries, key=lambda each: each.name)

    def remove_empty(self, folder: str) -> None:
        """Remove a folder if it is empty; buckets have no folders."""
        if self.is_folder:
            with suppress(OSError):
                Path(self._path(folder)).rmdir()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _write_file(self, name: str, payload: bytes, *, replace: bool) -> None:
        path = Path(self._path(name))
        # This name has the form of a chunk's, so what a killed process leaves of it is swept.
        fresh = path.with_suffix(f".{secrets.token_hex(8)}")
        try:
            try:
                stream = fresh.open("xb")
            except FileNotFoundError:  # also if the sweeper removed the empty folder just now
                self._make_folders(path.parent)
                stream = fresh.open("xb")
            with stream:
                stream.write(payload)
            publish(fresh, path, replace=replace)
        finally:
            fresh.unlink(missing_ok=True)

    def _make_folders(self, folder: Path) -> None:
        """Make the folders below the place's own, down to this one. Raises FileNotFoundError if its own is away."""
        made = Path(self._root)
        for name in folder.relative_to(made).parts:
            made /= name
            _make_folder(made)

    def _ask(self, method: str, /, *args: Any, **named: Any) -> Any:
        with plain_errors():
            if self._process != os.getpid():  # fsspec's connections don't outlive a fork
                self._files = _opened(self._scheme)
                self._process = os.getpid()
            return getattr(self._files, method)(*args, **named)


def _make_folder(folder: Path, mode: int = 0o777) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode)
    sync_folder(folder.parent)  # another process may have made it just now


def _opened(scheme: str) -> Any:
    import fsspec  # here, because it takes a tenth of a second, and most processes keep chunks in Redis

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        options["config_kwargs"] = _S3_PATIENCE
    try:
        return fsspec.filesystem(scheme, **options)
    except ImportError as error:
        if scheme == "s3":
            raise MissingExtra("s3", "chunk_files s3://") from error
        raise SettingsError(f"chunk_files {scheme}://: {error}") from error
    except ValueError as error:
        raise SettingsError(f"chunk_files {scheme}://: fsspec knows no such place: {error}") from error


def _modified(facts: dict[str, Any]) -> float:
    for name in ("LastModified", "mtime", "updated", "last_modified", "created"):
        found = facts.get(name)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
    return math.inf


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise every error of a store as an OSError. Most fsspec packages do that for most of them."""
    try:
        yield
    except (OSError, MissingExtra, SettingsError):
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _OF_STORES:
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error
