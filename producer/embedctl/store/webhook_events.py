"""The events that a webhook is to tell: the ends of batches."""

from __future__ import annotations

from dataclasses import dataclass

from embedctl.store.connection import Connection
from embedctl.store.lease import take_due
from embedctl_config import keys


@dataclass(frozen=True, slots=True)
class Event:
    """The end of a batch.

    Attributes:
        type: as OpenAI names it, such as `batch.completed`.
        created_s: since 1970.
        tries: how often it was told in vain.
    """

    id: str
    type: str
    batch_id: str
    created_s: int
    tries: int


class EventStore:
    """All events that are to be told. Threads may share it. Raises BrokerUnavailable if Redis can't be reached."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def take(self, token: str, lease_s: float) -> Event | None:
        """Take an event that is to be told now; None if there is none. As :func:`embedctl.store.lease.take_due`."""
        event_id = take_due(self._connection, keys.UNTOLD, keys.webhook_event, token, lease_s)
        if event_id is None:
            return None
        with self._connection.client() as client:
            found = client.hgetall(keys.webhook_event(event_id))
        facts = {name.decode(): value.decode() for name, value in found.items()}
        if "type" not in facts:  # it has expired meanwhile
            return None
        return Event(event_id, facts["type"], facts["batch"], int(facts["created"]), int(facts.get("tries", 0)))

    def note(self, event: Event, token: str, next_s: float | None) -> None:
        """Note a try, and when the next one is (seconds from now); None if the event is told, or given up.

        Counts for nothing if another process has taken the event since.
        """
        next_ms = -1 if next_s is None else int(next_s * 1000)
        self._connection.script("note_event", [keys.webhook_event(event.id), keys.UNTOLD], [event.id, token, next_ms])
