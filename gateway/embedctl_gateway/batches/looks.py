"""How often batches that wait are looked at."""

from __future__ import annotations

import threading
import time

#: Looks in a second of one gateway, at all batches that wait for something. So many take a tenth of a CPU.
_LOOKS_PER_S = 50.0


class Looks:
    """When batches that wait are looked at again: each in time, as long as these are not too many. The looks that there
    are in a second are shared by the tenants, so one with many batches delays nobody else's. Threads may share it."""

    def __init__(self, per_s: float = _LOOKS_PER_S) -> None:
        self._per_s = per_s
        self._changing = threading.Lock()
        #: Tenant → when all looks at its batches have had their turn, if that is not over.
        self._until: dict[str, float] = {}

    def pause_s(self, tenant: str, wanted_s: float) -> float:
        """How long one batch more of a tenant is to wait (seconds), at least as long as is wanted."""
        now = time.monotonic()
        with self._changing:
            self._until = {each: until for each, until in self._until.items() if until > now}
            until = self._until.get(tenant, now) + max(1, len(self._until)) / self._per_s
            self._until[tenant] = until
        return max(wanted_s, until - now)
