"""How far the queues are worked off, as the reaper judges whether a ticket is still in its queue."""

from __future__ import annotations

from collections.abc import Iterable

from embedctl.store.connection import Connection
from embedctl.store.queues import Queues
from embedctl_config import keys
from embedctl_config.errors import BrokerRefused, NotPermitted

#: Whoever sends tickets has Redis' clock only about right (ms).
_SKEW_MS = 10_000
#: A queue that has live workers and does not move for this long proves nothing: they may be at odds with its oldest
#: tickets (ms).
_PROVES_MS = 30 * 60 * 1000
#: Later than any ticket.
_ANY_MS = 1 << 53


class Heads:
    """The oldest tickets of queues, and since when they have been the oldest."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queues = Queues(connection)

    def taken_before(self, queues: Iterable[str], now_ms: int) -> dict[str, int]:
        """For each queue the time in ms by Redis' clock; a ticket that was sent before then is in it no more.

        One that was sent later is still there, if it was not lost, because queues are first in, first out. Where a
        queue does not tell, or stands still for half an hour, the time is later than that of any ticket.
        """
        names = sorted(set(queues))
        if not names:
            return {}
        try:
            oldest = self._queues.oldest(names)
        except (NotPermitted, BrokerRefused):  # by a list that was made for an older version, or for what a key holds
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
        """These queues have no live worker: that they do not move says nothing of their tickets."""
        notes = [_note(name) for name in set(queues)]
        if notes:
            with self._connection.client() as client:
                client.hdel(keys.NOTES, *notes)


def _read(note: bytes | None) -> tuple[int, int, int]:
    """A note's three times; zeros where there is none that can be read."""
    try:
        before, since, asked = map(int, (note or b"").split())
    except ValueError:
        return 0, 0, 0
    return before, since, asked


def _note(queue: str) -> str:
    return f"head:{queue}"
