"""The bytes of chunks: one small interface, and the implementation that keeps them in Redis."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from embedctl.data.references import parse_reference
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings

#: Bytes outside of Redis that nothing in Redis refers to are removed at this age (seconds). It is much longer
#: than anything takes between putting bytes and noting them in Redis.
GRACE_S = 900.0
#: Bytes that were put longer ago, and are not noted yet, are put again (seconds).
_FRESH_S = GRACE_S / 3


@dataclass(frozen=True, slots=True)
class Where:
    """What bytes belong to: the input or the result of a job's chunk."""

    job_id: str
    kind: Literal["in", "out"]
    chunk: int


@dataclass(frozen=True, slots=True)
class Entry:
    """What a listing says of one name.

    Attributes:
        name: in the store.
        is_folder: whether further names begin with it.
        modified: when it was put, in seconds since 1970 by the store's clock; infinite if the store does not say.
    """

    name: str
    is_folder: bool
    modified: float = 0.0


class DataPlane(ABC):
    """Keeps the bytes of chunks. Redis keeps a *value* for each: the bytes themselves, or a reference to them.

    Threads may share it, and so may the children of its process.
    """

    #: Whether it keeps bytes outside of Redis.
    is_outside: ClassVar[bool]

    @property
    @abstractmethod
    def store(self) -> str | None:
        """The id of the store outside of Redis; None if there is none.

        Raises:
            DataUnavailable: it can't be reached.
            SettingsError: the place is not one, or no producer has used it yet.
        """

    @abstractmethod
    def made_store(self) -> str | None:
        """The same; the store is made if nobody has used the place before. Raises as :attr:`store` does."""

    @abstractmethod
    def put(self, where: Where, payload: bytes) -> bytes:
        """Keep a chunk's bytes, so that they are durable when this returns. Returns the value for Redis.

        Raises:
            DataUnavailable: the store can't be reached, or refuses.
        """

    @abstractmethod
    def get(self, value: bytes, size: int | None = None) -> bytes | None:
        """The bytes of a value, or the first `size` of them; None if they are gone from the store.

        Raises:
            DataUnavailable: the store can't be reached, or refuses.
            WireForeign: the bytes are damaged.
            SettingsError: they are in another store than that of this process.
        """

    @abstractmethod
    def put_back(self, value: bytes, payload: bytes) -> None:
        """Keep the bytes of a value that Redis holds under their name, unless they are there.

        Raises:
            DataUnavailable: the store can't be reached, or refuses.
        """

    @abstractmethod
    def delete(self, values: Sequence[bytes]) -> None:
        """Remove the bytes of values that Redis no longer holds, as far as the store is this one.

        Raises:
            DataUnavailable: the store can't be reached, or refuses.
        """

    @abstractmethod
    def list(self, folder: str) -> Iterator[Entry]:
        """What is directly in a folder of this database's part of the store, in the order of names; "" is its top.

        Raises:
            DataUnavailable: the store can't be reached, or refuses.
        """


class InRedis(DataPlane):
    """Keeps the bytes in Redis: each value is the bytes themselves."""

    is_outside: ClassVar[bool] = False

    @property
    def store(self) -> None:
        return None

    def made_store(self) -> None:
        return None

    def put(self, where: Where, payload: bytes) -> bytes:
        return payload

    def get(self, value: bytes, size: int | None = None) -> bytes | None:
        if parse_reference(value) is not None:
            raise SettingsError(
                "the job's chunks are outside of Redis, and this process does not know where: set data_url to what the "
                "job's producer has"
            )
        return value[:size]

    def put_back(self, value: bytes, payload: bytes) -> None:
        """Redis has them with the value."""

    def delete(self, values: Sequence[bytes]) -> None:
        """Nothing is left to do: Redis has removed the value, and so the bytes."""

    def list(self, folder: str) -> Iterator[Entry]:
        return iter(())


class Upload:
    """A chunk's bytes on their way to Redis or to a store, for a caller that may have to ask again and again."""

    def __init__(self, plane: DataPlane, where: Where, payload: bytes) -> None:
        self._plane = plane
        self._where = where
        self._payload = payload
        self._value: bytes | None = None
        self._at = 0.0

    def value(self) -> bytes:
        """The value for Redis. The bytes are put at the first call, and again if that is so long ago that they may be
        removed before they are noted.

        Raises:
            DataUnavailable: the store can't be reached, or refuses.
            SettingsError: the job's store is not that of this process.
        """
        if self._value is None or _awake_or_not() - self._at > _FRESH_S:
            self._at = _awake_or_not()
            self._value = self._plane.put(self._where, self._payload)
        return self._value

    def noted(self) -> None:
        """Redis has noted the value. If this process was suspended before, the bytes may have been removed: put them
        back.

        Raises:
            DataUnavailable: the store can't be reached, or refuses.
        """
        if self._value is not None and _awake_or_not() - self._at > _FRESH_S:
            self._plane.put_back(self._value, self._payload)


def _awake_or_not() -> float:
    """A clock in seconds that goes on while the machine is suspended, where there is one: others sweep meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Places(Protocol):
    """Remembers which store a place held, so that an empty folder is not taken for a new store.

    Both methods raise BrokerUnavailable if Redis can't be reached.
    """

    def store_at(self, url: str) -> str | None:
        """The id of the store that this place held; None if that is not known."""

    def note(self, url: str, store: str) -> None:
        """Remember a place's store."""


def plane_of(settings: Settings, database: Callable[[], str], places: Places | None = None) -> DataPlane:
    """Where these settings keep the bytes of new jobs' chunks. Nothing is read or written yet.

    Args:
        database: which database of Redis this is.
        places: remembers where this database's jobs have had their stores; nothing does if None.

    Raises:
        SettingsError: `data_url` names no place of a kind that we know.
    """
    if not settings.data_url:
        return InRedis()
    from embedctl.data.outside import Outside

    return Outside(settings, database, places)
