"""Follows the progress of the queues, so that the reaper can tell whether a ticket is still in its queue."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from embedctl.store.connection import Connection
from embedctl.store.queues import Queues
from embedctl_config import keys
from embedctl_config.errors import BrokerRefused

#: The largest difference of a sender's clock from Redis' clock (ms).
_SKEW_MS = 10_000
#: A queue with live workers that does not move for this long proves nothing: its workers may be unable to take its
#: oldest tickets (ms).
_PROVES_MS = 30 * 60 * 1000
#: Later than any ticket.
_ANY_MS = 1 << 53


class Heads:
    """The oldest tickets of queues, and for how long they have been the oldest."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queues = Queues(connection)

    def taken_before(self, queues: Iterable[str], now_ms: int) -> dict[str, int]:
        """Queue → a time in ms by Redis' clock; a ticket that was sent before it is no longer in the queue.

        A ticket that was sent later is still there, unless it was lost, because queues are first in, first out. If a
        queue's tickets do not say, or if it stands still for half an hour, the time is later than that of any ticket.
        """
        names = sorted(set(queues))
        if not names:
            return {}
        try:
            oldest = self._queues.oldest(names)
        except BrokerRefused:  # a key of another type
            return dict.fromkeys(names, _ANY_MS)
        with self._connection.client() as client:
            notes = client.hmget(keys.NOTES, [_note(name) for name in names])
        found: dict[str, int] = {}
        moved: dict[str, str] = {}
        for name, sent, note in zip(names, oldest, notes, strict=True):
            found[name] = _ANY_MS
            if sent is None:
                continue
            before, since, asked = _read(note)
            if sent > before or now_ms - asked > 2 * _PROVES_MS:
                since = now_ms
            moved[_note(name)] = f"{max(sent, before) if since != now_ms else sent} {since} {now_ms}"
            if now_ms - since < _PROVES_MS:
                found[name] = min(sent, now_ms) - _SKEW_MS
        if moved:
            with self._connection.client() as client:
                pipe = client.pipeline(transaction=False).hset(keys.NOTES, mapping=moved)
                pipe.pexpire(keys.NOTES, keys.NOTES_TTL_S * 1000).execute()
        return found

    def standing_still(self, queues: Iterable[str]) -> None:
        """Forget these queues' progress: without a live worker, standing still says nothing about their tickets."""
        notes = [_note(name) for name in set(queues)]
        if notes:
            with self._connection.client() as client:
                client.hdel(keys.NOTES, *notes)


def _read(note: bytes | None) -> tuple[int, int, int]:
    """The three times of a note; zeros if it is missing or can't be parsed."""
    with suppress(ValueError):
        before, since, asked = map(int, (note or b"").split())
        return before, since, asked
    return 0, 0, 0


def _note(queue: str) -> str:
    return f"head:{queue}"
