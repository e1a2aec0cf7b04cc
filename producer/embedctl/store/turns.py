"""What processes take from each other when it is due: batches to run, and events to tell."""

from __future__ import annotations

from collections.abc import Callable

from embedctl.store.connection import Connection

#: Most that are looked at for one that is due.
_LOOKED_AT = 16


def take(connection: Connection, waiting: str, key_of: Callable[[str], str], token: str, lease_s: float) -> str | None:
    """Take one that is due, for a time; returns its id, or None if there is none.

    Args:
        waiting: the sorted set of all that wait, by the time when they are due.
        key_of: the key of one.
        token: of the process, for this one.
        lease_s: a process that is silent for so long counts as dead (seconds).
    """
    for each in due(connection, waiting):
        answer, _ = connection.script("take_batch", [key_of(each), waiting], [each, token, int(lease_s * 1000)])
        if answer == "taken":
            return each
    return None


def due(connection: Connection, waiting: str) -> list[str]:
    """A few of those that are due, the first ones first."""
    now_ms = connection.recent_now_ms()
    with connection.client() as client:
        found = client.zrangebyscore(waiting, "-inf", now_ms, start=0, num=_LOOKED_AT)
    return [each.decode() for each in found]
