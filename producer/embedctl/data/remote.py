"""A bucket, or another place that fsspec knows, as a store of bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from embedctl.data.files import Files
from embedctl.data.planes import Entry
from embedctl_config.errors import MissingExtra, SettingsError

#: How botocore asks: a store that does not answer must not hold a worker's thread for minutes.
_S3_PATIENCE = {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 2}}
#: Names are removed together, this many at once: the most that S3 takes.
_TOGETHER = 1000
#: The packages whose errors are those of a store.
_OF_STORES = ("botocore", "aiobotocore", "aiohttp", "asyncio", "google", "gcsfs", "azure", "adlfs", "requests")


class RemoteFiles(Files):
    """Objects under a URL, by fsspec. Credentials are found as the URL's own package finds them (`AWS_…`, `~/.aws`).

    An object appears whole or not at all.

    Args:
        url: such as `s3://bucket/prefix`.

    Raises:
        SettingsError: the URL's scheme is unknown.
        MissingExtra: the package for s3 is not installed.
    """

    may_be_another: ClassVar[bool] = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._process = 0
        self._files: Any = None
        self._root = ""

    def write(self, name: str, payload: bytes) -> None:
        self._ask(lambda files: files.pipe_file(self._path(name), payload))

    def write_first(self, name: str, payload: bytes) -> None:
        try:
            self._ask(lambda files: files.pipe_file(self._path(name), payload, mode="create"))
        except FileExistsError:
            raise
        except (OSError, NotImplementedError, TypeError) as error:
            # Not every store knows `If-None-Match`. Or the answer was lost: what is there must not be replaced then.
            if self._ask(lambda files: files.exists(self._path(name))):
                raise FileExistsError(name) from error
            self.write(name, payload)

    def read(self, name: str, size: int | None = None) -> bytes:
        found: bytes = self._ask(lambda files: files.cat_file(self._path(name), start=0 if size else None, end=size))
        return found

    def remove(self, names: Sequence[str]) -> None:
        for at in range(0, len(names), _TOGETHER):
            paths = [self._path(name) for name in names[at : at + _TOGETHER]]
            try:
                self._ask(partial(_remove, paths))
            except FileNotFoundError:
                for path in paths:
                    self._remove_one(path)

    def _remove_one(self, path: str) -> None:
        try:
            self._ask(lambda files: files.rm_file(path))
        except FileNotFoundError:
            return

    def names(self, folder: str) -> Sequence[Entry]:
        try:
            found = self._ask(lambda files: files.ls(self._path(folder), detail=True, refresh=True))
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
        """Buckets have no folders."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        with _plain_errors():
            if self._process != os.getpid():  # fsspec's connections don't outlive a fork
                self._files, self._root = _opened(self._url)
                self._process = os.getpid()
            return question(self._files)


def _remove(paths: Sequence[str], files: Any) -> None:
    files.rm(paths)


def _opened(url: str) -> tuple[Any, str]:
    scheme, _, rest = url.partition("://")
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtra("s3", f"data_url {scheme}://") from error
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        options["config_kwargs"] = _S3_PATIENCE
    try:
        return fsspec.filesystem(scheme, **options), rest.strip("/")
    except ImportError as error:
        if scheme == "s3":
            raise MissingExtra("s3", "data_url s3://") from error
        raise SettingsError(f"data_url {scheme}://: {error}") from error
    except ValueError as error:
        raise SettingsError(f"data_url {scheme}://: fsspec knows no such place: {error}") from error


def _modified(facts: dict[str, Any]) -> float:
    for name in ("LastModified", "mtime", "updated", "last_modified", "created"):
        found = facts.get(name)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
    return math.inf


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise every error of a store as an OSError. Most fsspec packages do that for most of them."""
    try:
        yield
    except (OSError, MissingExtra, SettingsError):
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _OF_STORES:
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error
