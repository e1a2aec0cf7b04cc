"""Room for what gateways do at once: all gateways on one Redis share it, and scripts count it there, by tenant."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embedctl.store.connection import Connection
from embedctl.store.lease import Lease
from embedctl_config import keys
from embedctl_config.errors import EmbedctlError


@dataclass(frozen=True, slots=True)
class Room:
    """Something that there is a bounded amount of.

    Attributes:
        name: without spaces.
        most: of all tenants.
        is_long: whether a caller can hold it for as long as it likes. Its last part is then kept for small calls.
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


class Ledger:
    """What this process holds of the room. Threads may share it. Redis gives its room to others if it is silent for
    :data:`keys.LEDGER_LEASE_S`. Every method raises BrokerUnavailable if Redis can't be reached."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._process = secrets.token_hex(8)
        self._held: Counter[str] = Counter()
        self._changing = threading.Lock()
        #: Renews what is held; its owner begins and ends it.
        self.lease = Lease(self._renew, keys.LEDGER_LEASE_S / 3)

    def take(self, tenant: str, amounts: Mapping[Room, int]) -> None:
        """Take room for a tenant, of all kinds or of none; raises NoRoom if there is not so much."""
        self._note(tenant, amounts, 1)
        try:
            answer, rest = self._ask(tenant, amounts, 1)
        except BaseException:
            self._note(tenant, amounts, -1)  # if it was taken, the next renewal gives it back
            raise
        if answer != "ok":
            self._note(tenant, amounts, -1)
            full = next(room for room in amounts if room.name == rest[0].decode())
            raise NoRoom(full, is_share=answer == "share")

    def give(self, tenant: str, amounts: Mapping[Room, int]) -> None:
        """Give room back. If Redis does not hear it, it hears it from the next renewal."""
        self._note(tenant, amounts, -1)
        self._ask(tenant, amounts, -1)

    def close(self) -> None:
        """Give back all that is held."""
        with self._changing:
            self._held.clear()
        self._connection.script("room", [], [self._process, 0, ""])

    def _renew(self) -> bool:
        with self._changing:
            held = [each for field, amount in self._held.items() for each in (field, amount)]
        self._connection.script("room", [], [self._process, keys.LEDGER_LEASE_S * 1000, "", *held])
        return True

    def _note(self, tenant: str, amounts: Mapping[Room, int], sign: int) -> None:
        with self._changing:
            for room, amount in amounts.items():
                field = f"{room.name} {tenant}"
                self._held[field] += sign * amount
                if not self._held[field]:
                    del self._held[field]

    def _ask(self, tenant: str, amounts: Mapping[Room, int], sign: int) -> tuple[str, list[Any]]:
        asked = [each for room, n in amounts.items() for each in (room.name, sign * n, room.most, int(room.is_long))]
        return self._connection.script("room", [], [self._process, keys.LEDGER_LEASE_S * 1000, tenant, *asked])
