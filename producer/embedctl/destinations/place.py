"""Where parts may go: one small interface, and the names of its implementations."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_PARTS = re.compile(r"part-(retry-)?\d{6,}\.parquet")


class Place(ABC):
    """Takes the parts of one job. Every method raises OSError if the place refuses."""

    #: Where it is, as it is stored with the job and shown to people.
    name: str

    @abstractmethod
    def check(self) -> None:
        """Check beforehand that it can be written, as far as that costs nothing.

        Raises:
            OutputError: it can't.
            MissingExtra: a package for it is not installed.
        """

    @abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Make the place, and keep other drainers out of it, as far as it can.

        Raises:
            OutputError: another one writes there, or :meth:`check` says why.
        """

    @abstractmethod
    def scratch(self, name: str) -> Path:
        """The local file in which a part is written before it is published."""

    @abstractmethod
    def publish(self, name: str, *, replace: bool = False) -> None:
        """Take the finished scratch file under its final name. It is durable when this returns.

        Raises:
            FileExistsError: the name is taken, and is not to be replaced: another drainer may have published it.
        """

    @abstractmethod
    def digest(self, name: str) -> tuple[str, int]:
        """The sha256 of a part in hexadecimal, and its size in bytes.

        Raises:
            FileNotFoundError: there is none.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """The size of a part in bytes; None if there is none."""

    @abstractmethod
    def source(self, name: str) -> Any:
        """What pyarrow opens to read a part."""

    @abstractmethod
    def listed(self) -> Sequence[str]:
        """The names of all files that are there."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A small file's content."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a part that no job counts on."""

    def names(self) -> list[str]:
        """The names of all parts and of the manifest that are there, sorted."""
        return sorted(name for name in self.listed() if name == MANIFEST or _PARTS.fullmatch(name) is not None)

    def path_of(self, name: str) -> str:
        """A file's full name, for people and programs."""
        return f"{self.name.rstrip('/')}/{name}"
