"""Chunks whose bytes are outside of Redis: what Redis says of them, and which database this is."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from embedctl.data import DataPlane
from embedctl.data.references import MOST_BYTES
from embedctl.store.connection import Connection
from embedctl_config import keys

#: For how long an answer about the database is good (seconds): Redis may be emptied while a process lives.
_GOOD_S = 60.0


class Database:
    """Which database of Redis this is: when it was first used, in ms.

    Args:
        connection: is not used before the first call.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known = ""
        self._at = 0.0

    def __call__(self) -> str:
        now = time.monotonic()
        if not self._known or now - self._at > _GOOD_S:
            self._at, self._known = now, self._ask()
        return self._known

    def _ask(self) -> str:
        with self._connection.client() as client:
            birth = client.get(keys.BIRTH)
            if birth is None:
                client.set(keys.BIRTH, self._connection.now_ms(), nx=True, px=keys.QUEUES_TTL_S * 1000)
                birth = client.get(keys.BIRTH)
        return str(int(birth))


class RememberedPlaces:
    """Which store each place held; an implementation of :class:`~embedctl.data.planes.Places`.

    Args:
        connection: is not used before the first call.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def store_at(self, url: str) -> str | None:
        with self._connection.client() as client:
            store = client.hget(keys.NOTES, _note(url))
        return None if store is None else str(store.decode())

    def note(self, url: str, store: str) -> None:
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False).hset(keys.NOTES, _note(url), store)
            pipe.pexpire(keys.NOTES, keys.NOTES_TTL_S * 1000).execute()


def _note(url: str) -> str:
    """The name of a note about a place."""
    return f"data_at:{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def unlink_with_bytes(
    connection: Connection, data: DataPlane, chunks: Sequence[str], others: Sequence[str] = ()
) -> None:
    """Remove inputs and results, and then their bytes, wherever they are.

    Args:
        chunks: keys of inputs and results.
        others: keys that are removed with them.

    Raises:
        DataUnavailable: the bytes stay, and are nobody's.
    """
    if not chunks:
        return
    with connection.client() as client:
        if data.is_outside:
            pipe = client.pipeline(transaction=False)
            for key in chunks:
                pipe.getrange(key, 0, MOST_BYTES - 1)
            values = pipe.execute()
        client.unlink(*chunks, *others)
    if data.is_outside:
        data.delete(values)
