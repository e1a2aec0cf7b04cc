"""Chunks whose bytes are outside of Redis: what Redis says of their places, and of this database."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

from embedctl.chunk_files import ChunkFiles
from embedctl.chunk_files.references import MOST_BYTES
from embedctl.store.connection import Connection
from embedctl_config import keys

#: For how long an answer about the database is good (seconds): Redis may be emptied while a process lives.
_GOOD_S = 60.0


class PlaceNotes:
    """What Redis knows of places, as :class:`~embedctl.chunk_files.chunks.Notes`. Redis is not asked before a call."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._database = ""
        self._at = 0.0

    def database(self) -> str:
        """When the database was first used, in ms."""
        now = time.monotonic()
        if not self._database or now - self._at > _GOOD_S:
            self._at = now
            with self._connection.client() as client:
                birth = client.get(keys.BIRTH)
                if birth is None:
                    client.set(keys.BIRTH, self._connection.now_ms(), nx=True, px=keys.QUEUES_TTL_S * 1000)
                    birth = client.get(keys.BIRTH)
            self._database = str(int(birth))
        return self._database

    def place_at(self, address: str) -> str | None:
        with self._connection.client() as client:
            found = client.hget(keys.NOTES, _note(address))
        return None if found is None else str(found.decode())

    def note(self, address: str, place_id: str) -> None:
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False).hset(keys.NOTES, _note(address), place_id)
            pipe.pexpire(keys.NOTES, keys.NOTES_TTL_S * 1000).execute()


def _note(address: str) -> str:
    """The name of a note about a place. It does not give the address away."""
    return f"data_at:{hashlib.sha256(address.encode()).hexdigest()}"


def unlink_with_bytes(
    connection: Connection,
    files: ChunkFiles,
    chunks: Sequence[str],
    others: Sequence[str] = (),
    unlink: Callable[[Sequence[str]], bool] | None = None,
) -> None:
    """Remove the inputs and results under these keys, other keys with them, and then their bytes, wherever they are.

    `unlink` removes the keys, and returns whether it did. Raises ChunkFilesUnavailable if these bytes stay, and are
    nobody's.
    """
    if not chunks and unlink is None:
        return
    outside = chunks if files.is_outside else ()
    values = connection.ask_each(outside, lambda pipe, key: pipe.getrange(key, 0, MOST_BYTES - 1))
    if unlink is None:
        with connection.client() as client:
            client.unlink(*chunks, *others)
    elif not unlink([*chunks, *others]):
        return
    files.delete(values)
