"""Where the parts of one job may go: a folder, or a bucket of S3 or of a store that speaks its protocol."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from embedctl.chunk_files.place import plain_errors
from embedctl.destinations.unfinished import check_folder, digest_of, locked, part_of
from embedctl_config import durable
from embedctl_config.errors import MissingExtra, SettingsError, UnusableOutput

MANIFEST = "manifest.json"
_PARTS = re.compile(r"part-(retry-)?\d{6,}\.parquet")
#: The name of the sha256 in an object's metadata.
_SHA256 = "embedctl-sha256"


class Place:
    """Takes the parts of one job: a local folder, which need not exist; its parent must. What is published there
    survives a power cut. Every method raises OSError if the place refuses.

    Attributes:
        name: where it is, as it is stored with the job and shown to people.
    """

    def __init__(self, where: str | Path) -> None:
        self._folder = Path(where).absolute()
        self.name = str(self._folder)

    def check(self) -> None:
        """Check beforehand that it can be written, as far as that can be seen; UnusableOutput says why not."""
        check_folder(self._folder if self._folder.exists() else self._folder.parent, self.name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the place, and keep other drainers out of it, as far as it can. OutputError: another one writes there,
        or :meth:`check` says why."""
        self.check()
        if not self._folder.is_dir():
            self._folder.mkdir()
            durable.sync_folder(self._folder.parent)
        with locked(self._folder / MANIFEST):
            yield

    def local(self, name: str) -> Path:
        """The local file that a part would be; it is written as :meth:`scratch` before it is published."""
        return self._folder / name

    def publish(self, name: str, *, replace: bool = False) -> None:
        """Take the finished scratch file under its final name. It is durable when this returns. FileExistsError: the
        name is taken, and is not to be replaced; another drainer may have published it."""
        # Unless it replaces: a drainer that stood still must not replace the part of the next one.
        durable.publish(self.scratch(name), self.local(name), replace=replace)

    def digest(self, name: str) -> tuple[str, int]:
        """The sha256 of a part in hexadecimal, and its size in bytes; FileNotFoundError if there is none."""
        return digest_of(self.local(name))

    def source(self, name: str) -> Any:
        """What pyarrow opens to read a part."""
        return self.local(name)

    def listed(self) -> Mapping[str, int]:
        """The names of all files that are there, and their sizes in bytes."""
        found = {}
        for each in self._folder.iterdir() if self._folder.is_dir() else ():
            with suppress(FileNotFoundError):  # renamed or removed meanwhile
                found[each.name] = each.lstat().st_size
        return found

    def read(self, name: str) -> bytes:
        """A small file's content."""
        return self.local(name).read_bytes()

    def remove(self, name: str) -> None:
        """Remove a part that no job counts on."""
        self.local(name).unlink(missing_ok=True)

    def scratch(self, name: str) -> Path:
        return part_of(self.local(name))

    def sizes(self) -> dict[str, int]:
        """The names of all parts and of the manifest that are there, sorted, and their sizes in bytes."""
        found = sorted(self.listed().items())
        return {name: size for name, size in found if name == MANIFEST or _PARTS.fullmatch(name) is not None}

    def path_of(self, name: str) -> str:
        """A file's full name, for people and programs."""
        return f"{self.name.rstrip('/')}/{name}"


class PartsBucket(Place):
    """Objects under a prefix of `s3://`. Credentials and endpoint are found as boto finds them (`AWS_…`, `~/.aws`).

    An object appears whole or not at all. S3 has no lock: the lease in Redis keeps other drainers out, and a part is
    made under its name only if there is none (`If-None-Match`), where the store knows that.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        if scheme != "s3" or not rest.strip("/"):
            raise SettingsError(f"{url}: parts go to a folder or to s3://BUCKET/PREFIX/")
        self._prefix = rest.strip("/")
        self.name = f"s3://{self._prefix}/"

    @cached_property
    def _files(self) -> Any:
        try:
            import s3fs
        except ImportError as error:
            raise MissingExtra("s3", "s3://") from error
        return s3fs.S3FileSystem(use_listings_cache=False)

    def check(self) -> None:
        try:
            self.listed()
        except OSError as error:
            raise UnusableOutput(f"{self.name} can't be used: {error.strerror or error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="embedctl-") as folder:
            self._folder = Path(folder)
            yield

    def publish(self, name: str, *, replace: bool = False) -> None:
        scratch = self.scratch(name)
        digest, size = digest_of(scratch)
        self._ask(
            "put_file",
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
        head = self._ask("call_s3", "head_object", Bucket=bucket, Key=key)
        return str(head["Metadata"].get(_SHA256, "")), int(head["ContentLength"])

    def source(self, name: str) -> Any:
        return self._ask("open", self._key(name), "rb")

    def listed(self) -> Mapping[str, int]:
        try:
            found = self._ask("ls", self._prefix, detail=True, refresh=True)
        except FileNotFoundError:
            if not self._ask("exists", self._prefix.partition("/")[0]):
                raise
            return {}
        return {each["name"].rpartition("/")[2]: each["size"] for each in found}

    def read(self, name: str) -> bytes:
        content: bytes = self._ask("cat_file", self._key(name))
        return content

    def remove(self, name: str) -> None:
        self._ask("rm_file", self._key(name))

    def _ask(self, method: str, /, *args: Any, **named: Any) -> Any:
        with plain_errors():
            return getattr(self._files, method)(*args, **named)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def place_of(where: str) -> Place:
    """The place with this path or URL; SettingsError if it is neither a path nor `s3://` and a bucket."""
    return PartsBucket(where) if "://" in where else Place(where)
