"""What waits in the queues: how many tickets, and since when. Only for people to read, but for what the reaper makes of
the oldest ones, where it can be wrong without harm."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embedctl.store.connection import Connection
from embedctl_config import keys

_SLICE = 100
#: So many of the oldest tickets say how far a queue is worked off: some of them may have come back to it.
_OLDEST = 10
#: A ticket takes about 1 KB; what is larger than this was put there by something else, and is not read (bytes).
_LARGEST_TICKET = 16 * 1024
#: No clock shows that (ms).
_LATEST_MS = 1 << 53


@dataclass(frozen=True, slots=True)
class Waiting:
    """The tickets that wait in one queue.

    Attributes:
        sent_ms: when the one that is taken next was first sent, by about Redis' clock; None where there is none, or
            where it does not say so, as an older version's.
    """

    tickets: int
    sent_ms: int | None


class Queues:
    """The queues of tickets, which are Celery's lists."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def waiting(self, queues: Sequence[str]) -> list[Waiting]:
        """What waits in each of these queues, read in slices; nothing in one that there is not.

        Raises:
            BrokerUnavailable: Redis can't be reached.
        """
        found: list[Waiting] = []
        for at in range(0, len(queues), _SLICE):
            with self._connection.client() as client:
                pipe = client.pipeline(transaction=False)
                for queue in queues[at : at + _SLICE]:
                    # Kombu pushes at the head and pops at the tail, to which it also gives back what was not done.
                    pipe.llen(queue).lindex(queue, -1)
                answers = pipe.execute()
            found += [
                Waiting(tickets, None if ticket is None else sent_ms(ticket))
                for tickets, ticket in zip(answers[::2], answers[1::2], strict=True)
            ]
        return found

    def oldest(self, queues: Sequence[str]) -> list[int | None]:
        """When the tickets were sent that are at the end of each of these queues where they are taken, in ms by about
        Redis' clock: no older ones are left but those that came back. None in a queue that is short, or does not say.

        Raises:
            BrokerUnavailable: Redis can't be reached.
            NotPermitted: its access list is of a version that did not ask this.
        """
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            for queue in queues:
                for at in range(_OLDEST + 1):
                    pipe.lindex(queue, -1 - at)
            answers = pipe.execute()
        found: list[int | None] = []
        for at in range(0, len(answers), _OLDEST + 1):
            *oldest, another = answers[at : at + _OLDEST + 1]
            times = [_not_before_its_job(ticket) for ticket in oldest if another is not None]
            # The newest of them: whoever forwards a ticket leaves it the time at which it was first sent.
            found.append(max((time for time in times if time is not None), default=None))
        return found


def _not_before_its_job(ticket: bytes) -> int | None:
    """When a ticket was sent, by its sender's clock, which may be wrong, but not before its job was made."""
    sent = sent_ms(ticket)
    if sent is None:
        return None
    try:
        made_s = keys.created_s(_body(ticket)[0][0])
    except (LookupError, TypeError, ValueError):
        return None  # no ticket of ours
    return max(sent, made_s * 1000)


def _body(ticket: bytes) -> Any:
    message: Any = json.loads(ticket)
    body = message["body"]
    if message["properties"]["body_encoding"] == "base64":
        body = base64.b64decode(body)
    return json.loads(body)


def sent_ms(ticket: bytes) -> int | None:
    """When a ticket says that it was first sent, by about Redis' clock; None where it does not say so.

    Args:
        ticket: a message as kombu keeps it: JSON around a body in base64, which is Celery's `[args, kwargs, …]`.
    """
    if len(ticket) > _LARGEST_TICKET:
        return None
    try:
        sent = _body(ticket)[1]["sent_ms"]
    except (ValueError, LookupError, TypeError, RecursionError):  # whoever may write to Redis may put anything there
        return None
    return sent if type(sent) is int and 0 < sent < _LATEST_MS else None
