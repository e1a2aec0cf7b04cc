"""Leases: what one process at a time may do, for a while that it renews.

Where each of them stands in Redis is its owner's matter: a script that writes under a lease checks its token itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Self

from embedctl.store.connection import Connection
from embedctl_config.errors import EmbedctlError

log = logging.getLogger(__name__)

#: The end of a lease waits this long for a renewal in progress, which may wait for a Redis that is away (seconds).
_END_S = 1.0
#: Most that are looked at for one that is due.
_LOOKED_AT = 16


def take_turn(connection: Connection, key: str, held_s: float) -> str:
    """The token of a turn of this length, if no process has it now; otherwise empty."""
    token = secrets.token_hex(8)
    with connection.client() as client:
        return token if client.set(key, token, nx=True, px=max(1, int(held_s * 1000))) else ""


def keep_turn(connection: Connection, key: str, token: str, held_s: float) -> bool:
    """Let a turn end this many seconds from now. False if this process had lost it already."""
    with connection.client() as client:
        mine: bool = client.get(key) == token.encode()
        if mine:
            client.pexpire(key, max(1, int(held_s * 1000)))
    return mine


def take_due(
    connection: Connection, waiting: str, key_of: Callable[[str], str], token: str, lease_s: float
) -> str | None:
    """Take the lease of a thing that is due, such as an event to tell; returns its id, or None if there is none.

    Args:
        waiting: the sorted set of all that wait, by the time when they are due. So it also ends lapsed leases.
        token: of the process, for this one.
        lease_s: a process that is silent for so long counts as dead (seconds).
    """
    for each in due(connection, waiting):
        answer, _ = connection.script("take_due", [key_of(each), waiting], [each, token, int(lease_s * 1000)])
        if answer == "taken":
            return each
    return None


def due(connection: Connection, waiting: str, now_ms: int | None = None, most: int = _LOOKED_AT) -> list[str]:
    """A few of those that are due now, or at a time by Redis' clock; the first ones first."""
    now_ms = connection.recent_now_ms() if now_ms is None else now_ms
    with connection.client() as client:
        found = client.zrangebyscore(waiting, "-inf", now_ms, start=0, num=most)
    return [each.decode() for each in found]


class Lease:
    """A lease that this process has taken, and renews until its end. A context manager.

    Args:
        renew: renews it; false says that the lease is lost. After an EmbedctlError it is called again.
        every_s: seconds between two renewals.
        first_s: seconds until the first one, if not as many.

    Attributes:
        lost: set once another process has the lease, or nobody.
        due: the time of the next renewal, by the monotonic clock.
    """

    def __init__(self, renew: Callable[[], bool], every_s: float, first_s: float | None = None) -> None:
        self.lost = threading.Event()
        self.due = time.monotonic() + (every_s if first_s is None else first_s)
        self._renew, self._every_s = renew, every_s

    def __enter__(self) -> Self:
        _renewals.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Renew it no more."""
        _renewals.remove(self)

    def renew(self) -> None:
        """Renew it once."""
        self.due = time.monotonic() + self._every_s
        try:
            if not self._renew():
                self.lost.set()
        except EmbedctlError as error:
            log.info("a lease can't be renewed now: %s", error)
        except Exception:  # the thread renews other leases too
            log.exception("a lease can't be renewed")


class _Renewals:
    """The thread of a process that renews its leases. It starts with the first one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leases: set[Lease] = set()
        self._in_progress: Lease | None = None
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        with self._changed:
            self._leases.add(lease)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
                self._thread.start()

    def remove(self, lease: Lease) -> None:
        with self._changed:
            self._leases.discard(lease)
            self._changed.wait_for(lambda: self._in_progress is not lease, _END_S)

    def _run(self) -> None:
        while True:
            self._next().renew()

    def _next(self) -> Lease:
        """The lease to renew, once it is time. The renewal before it is over."""
        with self._changed:
            self._in_progress = None
            self._changed.notify_all()
            self._leases = {each for each in self._leases if not each.lost.is_set()}
            while True:
                lease = min(self._leases, key=attrgetter("due"), default=None)
                if lease is not None and lease.due <= time.monotonic():
                    self._in_progress = lease
                    return lease
                self._changed.wait(None if lease is None else lease.due - time.monotonic())


_renewals = _Renewals()
# A child has neither its parent's thread nor its leases.
os.register_at_fork(after_in_child=_renewals.__init__)  # type: ignore[misc]
