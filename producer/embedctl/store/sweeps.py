"""Sweeps over sorted sets in slices. Their positions are in Redis, so all processes share them."""

from __future__ import annotations

from embedctl.store.connection import Connection
from embedctl_config import keys


def next_slice(connection: Connection, members: str, cursor: str, count: int) -> list[tuple[str, float]]:
    """The next members of a sorted set, with their scores; after the last one, the first ones again.

    The cursor is the sweep's name among the reaper's notes.
    """
    with connection.client() as client:
        at = int(client.hget(keys.NOTES, cursor) or 0)
        found = [(name.decode(), score) for name, score in client.zrange(members, at, at + count - 1, withscores=True)]
        if at or len(found) == count:
            pipe = client.pipeline(transaction=False)
            pipe.hset(keys.NOTES, cursor, at + count if len(found) == count else 0)
            pipe.pexpire(keys.NOTES, keys.NOTES_TTL_S * 1000).execute()
    return found
