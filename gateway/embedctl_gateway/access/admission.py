"""How much the gateway does at once: requests in flight, and the bytes of their bodies and answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from embedctl_gateway.http.refusals import busy

#: Bodies and answers in memory. A single request may have more, so that it is not refused for ever.
MAX_BYTES = 256 * 1024 * 1024
#: This part of the places is kept for tenants below their share.
_RESERVE = 8
#: A tenant that asked so lately counts as one that asks: refused callers come again sooner (seconds).
_LATELY_S = 10.0


class Admission:
    """Counts what is in flight: the `requests` that are being answered, at most `most`, and the bytes `held` of bodies
    and answers. A tenant that asks alone may have all places. If several ask, each has an equal share of them, and the
    last places are for those below their share. So a tenant that has all loses them as its requests end, and nobody
    waits."""

    def __init__(self, most: int, max_bytes: int = MAX_BYTES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = 0
        self.held = 0
        self._most = most
        self.max_bytes = max_bytes
        self._clock = clock
        self._reserve = max(1, most // _RESERVE)
        self._of_tenant: Counter[str] = Counter()
        #: When each tenant last asked, the latest at the end.
        self._asked: dict[str, float] = {}

    @contextmanager
    def bytes_held(self) -> Iterator[Bytes]:
        part = Bytes(self)
        try:
            yield part
        finally:
            self.held -= part.count

    @contextmanager
    def answering(self, tenant: str) -> Iterator[None]:
        """The place of a tenant's request; raises Refusal if there is none."""
        self.check(tenant)
        self.requests += 1
        self._of_tenant[tenant] += 1
        try:
            yield
        finally:
            self.requests -= 1
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    def check(self, tenant: str) -> None:
        """See that there is a place for one more request of a tenant; raises Refusal if there is none."""
        self._note(tenant)
        free = self._most - self.requests
        if free <= 0:
            raise busy(f"{self._most} requests are in flight; come again in a second")
        if free <= self._reserve and self._of_tenant[tenant] >= self._share():
            raise busy(
                f"your tenant has its share of the {self._most} requests that may be in flight, "
                "and others ask too; come again in a second"
            )

    def _share(self) -> float:
        """The places of each tenant that has any or asked lately."""
        return self._most / len(self._of_tenant.keys() | self._asked.keys())

    def _note(self, tenant: str) -> None:
        now = self._clock()
        self._asked.pop(tenant, None)
        self._asked[tenant] = now
        while now - self._asked[first := next(iter(self._asked))] > _LATELY_S:
            del self._asked[first]


class Bytes:
    def __init__(self, admission: Admission) -> None:
        self.count = 0
        self._admission = admission

    def hold(self, count: int) -> None:
        """Count more of them; raises Refusal if there is no room for them beside those of other requests."""
        admission = self._admission
        if admission.held + count > admission.max_bytes and admission.held > self.count:
            raise busy("too many large requests are in flight; come again in a second")
        admission.held += count
        self.count += count
