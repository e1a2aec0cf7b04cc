"""What a store of bytes outside of Redis must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from embedctl.data.planes import Entry


class Files(ABC):
    """Named bytes. A name has parts with slashes between them, and is used once.

    Every method raises OSError if the place refuses or can't be reached.
    """

    #: Whether another place may stand under the same name for a time, as an empty folder does while nothing is mounted.
    may_be_another: ClassVar[bool]

    @abstractmethod
    def write(self, name: str, payload: bytes) -> None:
        """Keep bytes under a name that nobody else uses; they are durable when this returns."""

    @abstractmethod
    def write_first(self, name: str, payload: bytes) -> None:
        """Keep bytes under a name that others may write at this moment; the first one wins, where the place can tell.

        Raises:
            FileExistsError: the name is taken.
        """

    @abstractmethod
    def read(self, name: str, size: int | None = None) -> bytes:
        """The bytes under a name, or the first `size` of them.

        Raises:
            FileNotFoundError: there are none.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove bytes; names that do not exist are ignored. A name that can't be removed keeps no other one."""

    @abstractmethod
    def names(self, folder: str) -> Sequence[Entry]:
        """What is directly in a folder, sorted by name; nothing if it does not exist."""

    @abstractmethod
    def remove_empty(self, folder: str) -> None:
        """Remove a folder if it is empty, where there are folders."""
