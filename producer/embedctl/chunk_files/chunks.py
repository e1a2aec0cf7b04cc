"""Where the bytes of chunks are. Redis holds a *value* for each chunk: the bytes themselves, or a reference to them."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from embedctl.chunk_files.place import Entry, Place
from embedctl.chunk_files.references import parse_reference, reference_to
from embedctl_config.errors import ChunkFilesUnavailable, EmbedctlError, SettingsError, WireForeign

#: Bytes outside of Redis that nothing in Redis refers to are removed at this age (seconds). It is much longer
#: than anything takes between putting bytes and noting them in Redis.
GRACE_S = 900.0
#: Bytes that were put longer ago, and are not noted yet, are put again (seconds).
_FRESH_S = GRACE_S / 3
#: The name of the file that says which place this is.
_MARK = "embedctl-chunks.json"
#: Chunks whose bytes share a folder, so that no listing grows with the job.
_SHARD = 500


@dataclass(frozen=True, slots=True)
class Where:
    """What bytes belong to: the input or the result of a job's chunk."""

    job_id: str
    kind: Literal["in", "out"]
    chunk: int


class Notes(Protocol):
    """What Redis knows of places. Every method raises BrokerUnavailable if Redis can't be reached."""

    def database(self) -> str:
        """Which database of Redis this is."""

    def place_at(self, address: str) -> str | None:
        """The id of the place that was at this address; None if that is not known."""

    def note(self, address: str, place_id: str) -> None:
        """Remember which place is at an address, so that an empty folder is not taken for a new place."""


class ChunkFiles:
    """Keeps the bytes of chunks in Redis, or at a place outside of it. Threads may share it, and so may the children of
    its process. Nothing is opened before the first call.

    Names at a place are `DATABASE/DAY/JOB/in|out/SHARD/CHUNK.TOKEN`: each database of Redis has a part of its own, and
    `TOKEN` is new for each put, so that nothing is ever replaced. Redis holds that name, and never the address: it is
    each process's own setting. A small chunk stays in Redis: a place takes longer for it than Redis needs memory.

    Methods that ask the place raise ChunkFilesUnavailable if it can't be reached or refuses, and SettingsError if there
    is none, or no producer has used it yet.

    Args:
        address: of the place, as :class:`Place` takes it; empty for Redis.
        inline_bytes: of the largest chunk that stays in Redis all the same.
        notes: what Redis knows of places; needed if there is one.
    """

    def __init__(self, address: str = "", inline_bytes: int = 0, notes: Notes | None = None) -> None:
        self._address = address
        self._place = Place(address) if address else None
        self._inline = inline_bytes
        self._notes = notes
        self._id: str | None = None

    @property
    def is_outside(self) -> bool:
        """Whether it keeps bytes outside of Redis."""
        return self._place is not None

    @property
    def place_id(self) -> str | None:
        """The id of the place outside of Redis; None if there is none."""
        return None if self._place is None else self._own_id()

    def make_place(self) -> str | None:
        """The same; a place that nobody has used before gets an id."""
        if self._id is None and self._place is not None:
            with self._asked() as place:
                try:
                    place.read(_MARK)
                except FileNotFoundError:
                    self._mark(place)
            self._known().note(self._address, self._own_id())
        return self._id

    def _mark(self, place: Place) -> None:
        if (known := self._known().place_at(self._address)) is not None:
            raise ChunkFilesUnavailable(
                f"chunk_files {self._address} held chunks as place {known}, and holds no {_MARK} now: is the folder "
                "mounted here? If it was emptied on purpose, take another name for the new one"
            )
        mark = json.dumps({"id": secrets.token_hex(8), "what": "chunks of embedctl's jobs"}).encode()
        with suppress(FileExistsError):  # another producer was faster
            place.write_first(_MARK, mark)

    def put(self, where: Where, payload: bytes) -> bytes:
        """Keep a chunk's bytes, so that they are durable when this returns. Returns the value for Redis."""
        if self._place is None or len(payload) <= self._inline:
            return payload
        place_id = self._own_id()
        job = f"{self._known().database()}/{where.job_id[:8]}/{where.job_id}"
        name = f"{job}/{where.kind}/{where.chunk // _SHARD:06d}/{where.chunk}.{secrets.token_hex(8)}"
        with self._asked(to_write=True) as place:
            place.write(name, payload)
        return reference_to(payload, name, place_id)

    def get(self, value: bytes, size: int | None = None) -> bytes | None:
        """The bytes of a value, or the first `size` of them; None if they are gone from their place.

        Raises WireForeign if they are damaged, and SettingsError if they are at another place than this process's.
        """
        reference = parse_reference(value)
        if reference is None:
            return value[:size]
        if self._place is None:
            raise SettingsError(
                "the job's chunks are outside of Redis, and this process does not know where: set chunk_files to what "
                "the job's producer has"
            )
        if reference.place != self.place_id:
            raise SettingsError(
                f"the job's chunks are at another place than chunk_files {self._address}: set it to what the job's "
                "producer has"
            )
        with self._asked() as place:
            try:
                data = place.read(reference.name, size)
            except FileNotFoundError:
                self._check(place)
                return None
        if not reference.fits(data, size):
            raise WireForeign(
                f"{reference.name} in chunk_files {self._address} is damaged: it is not what was put there"
            )
        return data

    def put_back(self, value: bytes, payload: bytes) -> None:
        """Keep the bytes of a value that Redis holds under their name, unless they are there."""
        reference = parse_reference(value)
        if reference is None or self._place is None:
            return
        with self._asked() as place:
            try:
                place.read(reference.name, 1)
            except FileNotFoundError:
                self._check(place)
                place.write(reference.name, payload)

    def delete(self, values: Sequence[bytes]) -> None:
        """Remove the bytes of values that Redis no longer holds, as far as they are at this place."""
        if self._place is None:
            return
        found = [reference for value in values if (reference := parse_reference(value)) is not None]
        if names := [each.name for each in found if each.place == self.place_id]:
            with self._asked() as place:
                place.remove(names)

    def list(self, folder: str) -> Iterator[Entry]:
        """What is directly in a folder of this database's part of the place, in the order of names; "" is its top."""
        top = self._known().database()
        with self._asked() as place:
            found = place.names(f"{top}/{folder}" if folder else top)
        for each in found:
            yield Entry(each.name[len(top) + 1 :], each.is_folder, each.modified)

    def remove_names(self, names: Sequence[str]) -> None:
        """Remove what :meth:`list` named."""
        with self._asked() as place:
            place.remove([f"{self._known().database()}/{name}" for name in names])

    def remove_empty(self, folder: str) -> None:
        """Remove a folder that :meth:`list` named, if nothing is left in it."""
        with self._asked() as place:
            place.remove_empty(f"{self._known().database()}/{folder}")

    def now(self) -> float | None:
        """The time by the place's own clock, in seconds since 1970; None if it can't be known."""
        folder = f"{self._known().database()}/clock"
        name = f"{folder}/{secrets.token_hex(8)}"
        with self._asked(to_write=True) as place:
            place.write(name, b"?")
            found = place.names(folder)
            place.remove([each.name for each in found])  # also those of processes that were killed
        return next((each.modified for each in found if each.name == name and math.isfinite(each.modified)), None)

    def _known(self) -> Notes:
        assert self._notes is not None, "whoever names a place gives the notes about places"
        return self._notes

    def _own_id(self) -> str:
        if self._id is None:
            with self._asked() as place:
                self._id = self._id_at(place)
        return self._id

    def _check(self, place: Place) -> None:
        """Raise ChunkFilesUnavailable if another place is there now: shares are unmounted, and others mounted there."""
        if self._id_at(place) != self._own_id():
            raise ChunkFilesUnavailable(
                f"chunk_files {self._address} is now another place than it was: what is mounted here?"
            )

    def _id_at(self, place: Place) -> str:
        try:
            mark = place.read(_MARK)
        except FileNotFoundError:
            wrong = f"chunk_files {self._address} holds no {_MARK}"
            # Who asks for the place has a job with chunks there. So a folder without a mark may yet be mounted.
            if place.is_folder or self._id is not None:
                raise ChunkFilesUnavailable(
                    f"{wrong}: is the folder mounted here, and is it what the producers use?"
                ) from None
            raise SettingsError(f"{wrong}: it is not what the producers use") from None
        with suppress(ValueError, LookupError, TypeError):
            found = json.loads(mark)["id"]
            if len(bytes.fromhex(found)) == 8:
                return str(found)
        raise SettingsError(f"chunk_files {self._address}: its {_MARK} can't be read: it is not embedctl's, or damaged")

    @contextmanager
    def _asked(self, *, to_write: bool = False) -> Iterator[Place]:
        """The place. What it refuses is raised as an error of ours.

        To write, see first that a folder is still the place that it was, where nothing is mounted for a time.
        """
        assert self._place is not None, "only a place outside of Redis is asked"
        try:
            if to_write and self._place.is_folder:
                self._check(self._place)
            yield self._place
        except EmbedctlError:  # some are OSErrors too
            raise
        except FileNotFoundError as error:
            raise ChunkFilesUnavailable(f"chunk_files {self._address} is not there: {error}") from error
        except OSError as error:
            raise ChunkFilesUnavailable(
                f"chunk_files {self._address} can't be used now: {error}. Chunks are kept there; what waits goes on by "
                "itself"
            ) from error


class Upload:
    """A chunk's bytes on their way to Redis or to a place, for a caller that may have to ask again and again."""

    def __init__(self, files: ChunkFiles, where: Where, payload: bytes) -> None:
        self._files = files
        self._where = where
        self._payload = payload
        self._value: bytes | None = None
        self._at = 0.0

    def value(self) -> bytes:
        """The value for Redis. The bytes are put at the first call, and again if that is so long ago that they may be
        removed before they are noted."""
        if self._value is None or _awake_or_not() - self._at > _FRESH_S:
            self._at = _awake_or_not()
            self._value = self._files.put(self._where, self._payload)
        return self._value

    def noted(self) -> None:
        """Redis has noted the value. If this process was suspended before, the bytes may have been removed: put them
        back."""
        if self._value is not None and _awake_or_not() - self._at > _FRESH_S:
            self._files.put_back(self._value, self._payload)


def _awake_or_not() -> float:
    """A clock in seconds that goes on while the machine is suspended, where there is one: others sweep meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
