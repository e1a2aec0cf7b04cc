"""Files of the gateway's callers: their facts are in Redis, and their bytes in parts, in Redis or outside of it."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from embedctl.chunk_files import ChunkFiles, Upload, Where
from embedctl.chunk_files.references import is_reference
from embedctl.store.connection import Connection
from embedctl.store.outside import unlink_with_bytes
from embedctl.store.quotas import Quotas, kept_most
from embedctl.store.scripts import flat
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerUnavailable, EmbedctlError, WireError

#: Bytes of a part, the last one apart.
PART_BYTES = 4 * 1024 * 1024
#: The largest file whose parts are in Redis, as at OpenAI, and the largest one outside of it.
_MOST_BYTES, _MOST_OUTSIDE = 512 * 1024**2, 16 * 1024**3
#: No file is larger than this part of what a tenant may keep: more is never free for one upload, and a batch needs room
#: beside its file.
_LARGEST_PART = 0.75
#: What every part begins with, as chunks do, so that a reference to it is told from it.
_HEAD = wire.MAGIC + bytes([wire.ELSEWHERE]) + bytes(wire.PREFIX_BYTES - len(wire.MAGIC) - 1)
#: The fields of a file that are numbers.
_NUMBERS = ("size", "created_s", "expires_s", "parts")
#: Parts, or files of a list, that are asked for at once.
_SLICE = 200


class FileGone(EmbedctlError):
    """Raised when a file that was there a moment ago has been deleted, or has expired. It will not come back."""


class OtherRequest(EmbedctlError):
    """Raised when another request has the idempotency key of this one."""


class KeepsEnough(EmbedctlError):
    """Raised when a tenant keeps as many files, batches or bytes as it may."""


@dataclass(frozen=True, slots=True)
class Once:
    """A request that makes a file or a batch once, however often it is tried.

    Attributes:
        name: the same for all tries: the call, the tenant, and the caller's idempotency key or else the digest.
        digest: of all that the request asks for.
        again: whether an earlier try may have been carried out.
    """

    name: str
    digest: str
    again: bool


class StoredFile(NamedTuple):
    """A complete file.

    Attributes:
        size: bytes.
        sha256: in hexadecimal.
        created_s, expires_s: since 1970.
        data: what the names of its parts begin with.
    """

    id: str
    tenant: str
    name: str
    purpose: str
    size: int
    sha256: str
    created_s: int
    expires_s: int
    parts: int
    data: str

    def fields(self) -> list[str]:
        """Fields and values of its hash, all but the id."""
        return flat({name: value for name, value in self._asdict().items() if name != "id"})

    @property
    def ttl_ms(self) -> int:
        """Its time to live, from its making."""
        return (self.expires_s - self.created_s) * 1000


class FileStore:
    """All files. Threads may share it. Every method raises BrokerUnavailable if Redis, or the place of the parts, can't
    be reached."""

    def __init__(self, connection: Connection, files: ChunkFiles) -> None:
        self._connection = connection
        self._files = files
        self._quotas = Quotas(connection)

    def most_bytes(self) -> int:
        """The size of the largest file. A tenant that uploads and keeps nothing else has room for it."""
        most = _MOST_OUTSIDE if self._files.is_outside else _MOST_BYTES
        return min(most, int(kept_most(self._connection, self._files) * _LARGEST_PART))

    def writer(self) -> PartWriter:
        """Takes the bytes of a new file."""
        self._files.make_place()
        return PartWriter(self._connection, self._files)

    def make(self, file: StoredFile, request: Once) -> str:
        """Make a file whose parts are there; returns its id.

        A further try of a request makes no second file: the id is that of the one that was made before. Raises
        OtherRequest if this name was another request's, and KeepsEnough if the tenant keeps as much as it may.
        """
        kept = (file.size, kept_most(self._connection, self._files))
        script_keys = [keys.file(file.id), keys.files(file.tenant)]
        facts = (file.id, file.ttl_ms, file.fields(), request, kept)
        try:
            return make(self._connection, script_keys, *facts)
        except KeepsEnough:  # jobs may have expired
            self._quotas.correct(file.tenant)
            return make(self._connection, script_keys, *facts)

    def get(self, file_id: str, tenant: str) -> StoredFile | None:
        """A tenant's file; None if it has no such file."""
        with self._connection.client() as client:
            found = _parse(file_id, client.hgetall(keys.file(file_id)))
        return found if found is not None and found.tenant == tenant else None

    def newest(
        self, tenant: str, some: int, after: str = "", *, descending: bool = True, purpose: str | None = None
    ) -> Iterator[list[StoredFile]]:
        """A tenant's files, in the order of their ids, from the one after `after` on, up to `some` at a time."""
        some = some if purpose is None else _SLICE  # of these, perhaps none has the purpose
        for made in listed(self._connection, keys.files(tenant), some, after, descending=descending):
            files = [_parse(file_id, facts) for file_id, facts in made]
            yield [file for file in files if file and purpose in (None, file.purpose)]

    def part(self, file: StoredFile, number: int, begin: int = 0, end: int = PART_BYTES) -> bytes:
        """Bytes of a part of a file, at least one; raises FileGone if the file has been deleted, or has expired. Redis
        is asked for no more than these."""
        name, begin, end = keys.chunk_result(file.data, number), len(_HEAD) + begin, len(_HEAD) + end
        with self._connection.client() as client:
            is_outside = is_reference(client.getrange(name, 0, len(_HEAD) - 1))
            value: bytes | None = client.get(name) if is_outside else client.getrange(name, begin, end - 1)
        data = value
        if is_outside:
            try:
                whole = None if value is None else self._files.get(value, end)
            except WireError as error:
                raise BrokerUnavailable(f"part {number} of {file.id} can't be read: {error}") from error
            data = None if whole is None else whole[begin:]
        if not data:
            raise FileGone(f"{file.id} is gone")
        return data

    def read(self, file: StoredFile) -> Iterator[bytes]:
        """All of its bytes, part by part. Raises as :meth:`part` does."""
        return (self.part(file, number) for number in range(file.parts))

    def remove(self, file: StoredFile) -> None:
        """Remove a file. If the process dies meanwhile, what is left of it goes with its time to live."""
        script_keys = [keys.file(file.id), keys.files(file.tenant)]
        self._connection.script("drop_file", script_keys, [file.id, file.size])
        remove_parts(self._connection, self._files, file.data, file.parts)


class PartWriter:
    """Takes the bytes of a file, `size` of them so far, and keeps them in parts. Memory holds one part, or what is
    added at once.

    Nobody sees them before they are made a file. Parts that are not go with their time to live. Raises as
    :class:`FileStore` does.
    """

    def __init__(self, connection: Connection, files: ChunkFiles) -> None:
        self._connection = connection
        self._files = files
        self._name = _new_name(connection)
        self._held = bytearray()
        self._hash = hashlib.sha256()
        self._parts = 0
        self.size = 0

    def add(self, data: bytes | bytearray) -> None:
        """Take more bytes."""
        self._hash.update(data)
        self.size += len(data)
        self._held += data
        while len(self._held) >= PART_BYTES:
            self._put(self._held[:PART_BYTES])
            del self._held[:PART_BYTES]

    @property
    def waiting(self) -> int:
        """Bytes in memory."""
        return len(self._held)

    def finish(self, *, tenant: str, name: str, purpose: str, ttl_s: int) -> StoredFile:
        """The file of all bytes, whose parts live as long as it once it is made."""
        if self._held:
            self._put(self._held)
            self._held = bytearray()
        left_ms = keys.UNFINISHED_FILE_TTL_S * 1000
        for numbers in _slices(self._parts):
            parts = [keys.chunk_result(self._name, number) for number in numbers]
            if not all(self._connection.ask_each(parts, lambda pipe, key: pipe.pexpire(key, left_ms))):
                raise BrokerUnavailable("the upload took longer than its parts live")
        now_ms = self._connection.recent_now_ms()
        now_s = now_ms // 1000
        return StoredFile(
            id=new_id("file-", now_ms),
            tenant=tenant,
            name=name,
            purpose=purpose,
            size=self.size,
            sha256=self._hash.hexdigest(),
            created_s=now_s,
            expires_s=now_s + ttl_s,
            parts=self._parts,
            data=self._name,
        )

    def discard(self) -> None:
        """Remove the parts."""
        remove_parts(self._connection, self._files, self._name, self._parts)

    def _put(self, data: bytes | bytearray) -> None:
        while True:
            upload = Upload(self._files, Where(self._name, "out", self._parts), _HEAD + bytes(data))
            if self._is_stored(upload.value()):
                break
            self._name = _new_name(self._connection)
        upload.noted()
        self._parts += 1

    def _is_stored(self, value: bytes) -> bool:
        """Store a part; false if its name is taken. Names are short, so a job or another file may have this one."""
        key = keys.chunk_result(self._name, self._parts)
        with self._connection.client() as client:
            is_first = self._parts == 0
            if is_first and client.exists(keys.job(self._name)):
                return False
            stored = client.set(key, value, px=keys.UNFINISHED_FILE_TTL_S * 1000, nx=is_first)
            return bool(stored) or client.get(key) == value  # the answer was lost


def _new_name(connection: Connection) -> str:
    now = time.gmtime(connection.recent_now_ms() // 1000)
    return f"{time.strftime('%Y%m%d-%H%M%S', now)}-{secrets.token_hex(5)}"


def new_id(prefix: str, now_ms: int) -> str:
    """A new id, which sorts behind those that were made in an earlier millisecond, by Redis' clock."""
    return f"{prefix}{now_ms:011x}{secrets.token_hex(7)[:13]}"


def digest_of(*facts: Any) -> str:
    """A name for a request, without anything of it in clear."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def make(
    connection: Connection,
    script_keys: Sequence[str],
    made_id: str,
    ttl_ms: int,
    fields: Sequence[Any],
    request: Once,
    kept: tuple[int, int] = (0, 0),
) -> str:
    """Make what the first two keys name, its hash and its tenant's set; returns its id, or that of what this request
    has made before. `kept` are its bytes, and the most that a tenant keeps. Raises OtherRequest if this name was
    another request's, and KeepsEnough if the tenant keeps as much as it may."""
    known = [int(request.again), keys.MADE_TTL_S * 1000, request.digest]
    args = [made_id, ttl_ms, *known, *kept, keys.KEPT_MOST, *fields]
    answer, rest = connection.script("make", [*script_keys, keys.made(request.name)], args)
    if answer == "other":
        raise OtherRequest("another request was made with this idempotency key")
    if answer == "full":
        raise KeepsEnough(
            "your tenant keeps as many files, batches or bytes as it may: delete files, fetch and discard jobs, or wait"
        )
    found: str = rest[0].decode()
    return found


def listed(
    connection: Connection, within: str, some: int, after: str, *, descending: bool
) -> Iterator[list[tuple[str, Mapping[bytes, bytes]]]]:
    """The ids of a tenant's files or batches, in their order, and what their hashes hold, up to `some` at a time.
    Others may come and go meanwhile; the ids of those that are gone leave the set."""
    while True:
        args = [after, "REV" if descending else "", min(some, _SLICE)]
        _, (last, *found) = connection.script("list", [within], args)
        yield [
            (made_id.decode(), dict(zip(facts[::2], facts[1::2], strict=True)))
            for made_id, facts in zip(found[::2], found[1::2], strict=True)
        ]
        if not last:
            return
        after = last.decode()


def remove_parts(connection: Connection, files: ChunkFiles, name: str, parts: int) -> None:
    """Remove the parts of a file, wherever they are."""
    for numbers in _slices(parts):
        unlink_with_bytes(connection, files, [keys.chunk_result(name, number) for number in numbers])


def texts_of(facts: Mapping[bytes, bytes]) -> dict[str, str]:
    """What a hash holds."""
    return dict(zip(map(bytes.decode, facts), map(bytes.decode, facts.values()), strict=True))


def _parse(file_id: str, facts: Mapping[bytes, bytes]) -> StoredFile | None:
    if not facts:
        return None
    fields: dict[str, Any] = texts_of(facts)
    for name in _NUMBERS:
        fields[name] = int(fields[name])
    return StoredFile(id=file_id, **fields)


def _slices(count: int) -> Iterator[range]:
    return (range(at, min(at + _SLICE, count)) for at in range(0, count, _SLICE))
