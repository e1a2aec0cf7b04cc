"""A bucket of S3, or of a store that speaks its protocol, as a place for parts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from embedctl.chunk_files.place import plain_errors
from embedctl.destinations.digest_rows import digest_of
from embedctl.destinations.place import Place
from embedctl_config.errors import MissingExtra, OutputError, SettingsError

#: The name of the sha256 in an object's metadata.
_SHA256 = "embedctl-sha256"


class PartsBucket(Place):
    """Objects under a prefix. Credentials and endpoint are found as boto finds them (`AWS_…`, `~/.aws`).

    An object appears whole or not at all. S3 has no lock: the lease in Redis keeps other drainers out, and a part is
    made under its name only if there is none (`If-None-Match`), where the store knows that.

    Args:
        url: such as `s3://bucket/prefix/`.

    Raises:
        SettingsError: it is another kind of URL, or names no bucket.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        if scheme != "s3" or not rest.strip("/"):
            raise SettingsError(f"{url}: parts go to a folder or to s3://BUCKET/PREFIX/")
        self._prefix = rest.strip("/")
        self.name = f"s3://{self._prefix}/"
        self._folder: Path | None = None

    @cached_property
    def _files(self) -> Any:
        try:
            import s3fs
        except ImportError as error:
            raise MissingExtra("s3", "s3://") from error
        return s3fs.S3FileSystem(use_listings_cache=False)

    def check(self) -> None:
        with plain_errors():
            _ = self._files

    @contextmanager
    def locked(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="embedctl-") as folder:
            self._folder = Path(folder)
            yield

    def scratch(self, name: str) -> Path:
        if self._folder is None:
            raise OutputError(f"{self.name} is not open for writing")
        return self._folder / name

    def publish(self, name: str, *, replace: bool = False) -> None:
        scratch = self.scratch(name)
        digest, size = digest_of(scratch)
        with plain_errors():
            self._files.put_file(
                str(scratch),
                self._key(name),
                mode="overwrite" if replace else "create",
                Metadata={_SHA256: digest},
                ContentType="application/octet-stream",
            )
        if self.digest(name) != (digest, size):  # asked of the store, and not of a cache
            raise OSError(f"{self.path_of(name)} is not what was sent")
        scratch.unlink()

    def digest(self, name: str) -> tuple[str, int]:
        bucket, _, key = self._key(name).partition("/")
        with plain_errors():
            head = self._files.call_s3("head_object", Bucket=bucket, Key=key)
        return str(head["Metadata"].get(_SHA256, "")), int(head["ContentLength"])

    def size(self, name: str) -> int | None:
        try:
            return self.digest(name)[1]
        except FileNotFoundError:
            return None

    def source(self, name: str) -> Any:
        with plain_errors():
            return self._files.open(self._key(name), "rb")

    def listed(self) -> Sequence[str]:
        with plain_errors():
            try:
                found = self._files.ls(self._prefix, detail=False, refresh=True)
            except FileNotFoundError:
                if not self._files.exists(self._prefix.partition("/")[0]):
                    raise
                return []
        return [key.rpartition("/")[2] for key in found]

    def read(self, name: str) -> bytes:
        with plain_errors():
            content: bytes = self._files.cat_file(self._key(name))
        return content

    def remove(self, name: str) -> None:
        with plain_errors():
            self._files.rm_file(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
