"""States the limits of tenants that a worker's settings hold."""

from __future__ import annotations

import hashlib
import logging
import time

from embedctl.queueing.broker import Broker
from embedctl.store.lease import take_turn
from embedctl.store.quotas import Overruled
from embedctl_config import keys
from embedctl_config.tenants import LIMITS, RATES

log = logging.getLogger(__name__)

_STATED = ("weight", *LIMITS, *RATES)
#: Seconds between two statements.
INTERVAL_S = 30.0


class Limits:
    """States the limits again and again: Redis may lose them, and producers may have other settings.

    Each worker does so at its start. Then those that have the same limits take turns.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._digest = hashlib.sha256(repr(sorted(broker.settings.tenants.items())).encode()).hexdigest()
        self._since_ms = 0
        self._next = 0.0
        self._overruled: dict[str, Overruled] = {}

    def round(self, worker: str) -> None:
        """State the limits if it is time, in the name of this worker; BrokerUnavailable if Redis can't be reached."""
        limits = self._broker.settings.tenants
        if not limits or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL_S
        turn = take_turn(self._broker.connection, keys.stating(self._digest), INTERVAL_S * 0.9)
        if not turn and self._since_ms:
            return  # another worker with the same limits states them
        self._since_ms = self._since_ms or self._broker.connection.now_ms()
        for tenant, entry in limits.items():
            other = self._broker.quotas.state(tenant, entry, by=worker, since_ms=self._since_ms)
            if other is not None and other != self._overruled.get(tenant):
                log.warning(
                    "tenant %s: the weight and the limits of this worker's settings do not hold, because worker %s, "
                    "which was started later, has others: %s. Give all workers the same settings",
                    tenant,
                    other.by,
                    ", ".join(f"{name} {value:g}" for name, value in zip(_STATED, other.values, strict=True)),
                )
                self._overruled[tenant] = other
