"""Room for what gateways do at once: all gateways on one Redis share it, and scripts count it there, by tenant."""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from embedctl.store.connection import Connection
from embedctl.store.lease import Lease
from embedctl.store.scripts import ScriptCall
from embedctl_config import keys
from embedctl_config.errors import EmbedctlError


@dataclass(frozen=True, slots=True)
class Room:
    """Something that there is a bounded amount of.

    Attributes:
        name: without spaces.
        most: of all tenants.
        is_long: whether a caller can hold it for as long as it likes. A tenant then has at most as
            much of it as is free.
    """

    name: str
    most: int
    is_long: bool = False


class NoRoom(EmbedctlError):
    """Raised if there is not so much room now. With `is_share`, there is some for tenants that have less."""

    def __init__(self, room: Room, *, is_share: bool) -> None:
        super().__init__(f"no room: {room.name}")
        self.room = room
        self.is_share = is_share


class Asked:
    """What a script is asked with (`said`), and whether it has taken the room."""

    def __init__(self, taking: Taking | None, said: str) -> None:
        self._taking = taking
        self.said = said
        self.is_taken = False

    def heard(self, answer: str, rest: Sequence[bytes]) -> None:
        """Hear the script's answer; raises NoRoom if that is what it says."""
        if answer == "no_room" and self._taking is not None:
            raise self._taking.refused(*(each.decode() for each in rest))
        self.is_taken = answer in ("ok", "created")


class Taking:
    """Room of all these kinds for a call of a tenant, or of none, until :meth:`give`. It is made by
    :meth:`Ledger.taking`. Threads may share it."""

    def __init__(self, ledger: Ledger, tenant: str, amounts: Mapping[Room, int], texts: int) -> None:
        self._ledger = ledger
        self._tenant = tenant
        self._amounts = amounts
        self._texts = texts
        self._is_held = self._is_over = False

    def take(self) -> None:
        """Take it now; raises NoRoom if there is not so much."""
        with self.asked() as asked:
            asked.heard(*self._ledger.ask(asked.said))

    @contextmanager
    def asked(self) -> Iterator[Asked]:
        """Inside the block, a script is asked. If the block raises, nothing counts as taken."""
        self._ledger.note(self.fields, 1)
        taken = False
        try:
            take = [(room.name, amount, room.most, room.is_long) for room, amount in self._amounts.items()]
            asked = Asked(self, self._ledger.said(tenant=self._tenant, take=take, texts=self._texts))
            yield asked
            taken = asked.is_taken
        finally:
            if not taken:  # if it was taken after all, the next renewal gives it back
                self._ledger.note(self.fields, -1)
            self._is_held = taken
            if self._is_over:
                self.give()

    def refused(self, how: str, kind: str) -> NoRoom:
        """The error for the answer of a script that there is no room."""
        return NoRoom(next(room for room in self._amounts if room.name == kind), is_share=how == "share")

    def give(self) -> None:
        """Give the room back, at once or as soon as it is taken. Redis hears that from the next call of the ledger."""
        self._is_over = True
        self._ledger.give(self)

    def is_let_go(self) -> bool:
        """Whether it was held until now; from now on, it is not."""
        held, self._is_held = self._is_held, False
        return held

    @property
    def fields(self) -> dict[str, int]:
        """`kind tenant` → how much."""
        return {f"{room.name} {self._tenant}": amount for room, amount in self._amounts.items()}


#: The room that is taken in the same step as the next job is made.
_with_job: ContextVar[Taking | None] = ContextVar("with_job", default=None)


@contextmanager
def taken_with_job(taking: Taking | None) -> Iterator[None]:
    """Inside this context, what makes a job takes this room in the same step, or raises NoRoom. So it costs no round
    trip of its own."""
    token = _with_job.set(taking)
    try:
        yield
    finally:
        _with_job.reset(token)


@contextmanager
def asked_with_job() -> Iterator[Asked]:
    """What the script that makes a job is asked with, for its room: nothing if it takes none. See
    :func:`taken_with_job`."""
    taking = _with_job.get()
    if taking is None:
        yield Asked(None, "")
        return
    with taking.asked() as asked:
        yield asked


class Ledger:
    """What this process holds of the room. Threads may share it. Redis gives its room to others if it is silent for
    :data:`keys.LEDGER_LEASE_S`. Every method raises BrokerUnavailable if Redis can't be reached."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._process = secrets.token_hex(8)
        #: `kind tenant` → how much is held, and how much was given back since Redis heard of it.
        self._held: Counter[str] = Counter()
        self._given: Counter[str] = Counter()
        self._changing = threading.Lock()
        #: Renews what is held; its owner begins and ends it.
        self.lease = Lease(self._renew, keys.LEDGER_LEASE_S / 3)

    def taking(self, tenant: str, amounts: Mapping[Room, int], texts: int = 0) -> Taking:
        """Room that is not taken yet. What makes a job with it raises QuotaExceeded, if its tenant can't add so many
        texts at once."""
        return Taking(self, tenant, amounts, texts)

    def take(self, tenant: str, amounts: Mapping[Room, int]) -> Taking:
        """Take room for a tenant, of all kinds or of none; raises NoRoom if there is not so much."""
        taking = self.taking(tenant, amounts)
        taking.take()
        return taking

    def ask(self, said: str) -> tuple[str, list[Any]]:
        """Ask for room alone; returns the answer."""
        return self._connection.script("room", [], [said])

    def telling(self) -> list[ScriptCall]:
        """The calls, one or none, that tell Redis what was given back, to be made with others. What it does not hear
        from them, it hears from the next renewal."""
        return [ScriptCall("room", [], [self.said()])] if self._given else []

    def tell(self) -> None:
        """Tell Redis what was given back."""
        if self._given:
            self.ask(self.said())

    def close(self) -> None:
        """Give back all that is held."""
        with self._changing:
            self._held.clear()
        self._renew()

    def _renew(self) -> bool:
        self.ask(self.said(renews=True))
        return True

    def said(self, *, renews: bool = False, tenant: str = "", take: Sequence[object] = (), texts: int = 0) -> str:
        """What `rooms.lua` takes, with all that was given back."""
        with self._changing:
            given, self._given = self._given, Counter()
            holds = {"holds": dict(self._held)} if renews else {}
        of_gateway = {"gateway": self._process, "lease_ms": keys.LEDGER_LEASE_S * 1000}
        return json.dumps({**of_gateway, "tenant": tenant, "take": take, "texts": texts, "give": given, **holds})

    def note(self, fields: Mapping[str, int], sign: int) -> None:
        """Count what is asked for as held, or no more."""
        with self._changing:
            self._add(fields, sign)

    def give(self, taking: Taking) -> None:
        """Count what was taken as given back, if it was held until now."""
        with self._changing:
            if taking.is_let_go():
                self._add(taking.fields, -1)
                self._given.update(taking.fields)

    def _add(self, fields: Mapping[str, int], sign: int) -> None:
        for field, amount in fields.items():
            self._held[field] += sign * amount
            if not self._held[field]:
                del self._held[field]
