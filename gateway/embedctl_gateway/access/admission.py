"""How much is done at once: requests, their bytes and uploads, which all gateways on one Redis count together; and the
bytes in the memory of this process."""

from __future__ import annotations

from collections import Counter

from embedctl.store.ledger import Ledger, NoRoom, Room, Taking
from embedctl_gateway.http.refusals import Refusal, busy

#: Bodies and answers in memory. A single request may have more, so that it is not refused for ever.
MAX_BYTES = 256 * 1024 * 1024
#: Bytes of the bodies that are being answered, and uploads that are open.
BYTES, UPLOADS = Room("bytes", MAX_BYTES, is_long=True), Room("uploads", 32, is_long=True)


class Admission:
    """Counts what is in flight: the `requests` of this gateway, and the bytes `held` by bodies and answers here.

    Of the `places` of requests, a tenant that asks alone may have all. If several ask, each has an equal share of them,
    and the last places are for those below their share. So a tenant that has all loses them as its requests end, and
    nobody waits.
    """

    def __init__(self, ledger: Ledger, places: int, max_bytes: int = MAX_BYTES) -> None:
        self.requests = 0
        self.held = 0
        self.places = Room("places", places)
        self.ledger = ledger
        self.max_bytes = max_bytes
        self.of_client: Counter[str] = Counter()

    def refusal(self, error: NoRoom) -> Refusal:
        """What a caller is told if there is no room."""
        what = {self.places: f"{self.places.most} requests", UPLOADS: f"{UPLOADS.most} uploads"}.get(error.room)
        if what is None:
            return busy("too many large requests are in flight; come again in a second")
        if not error.is_share:
            return busy(f"{what} are in flight; come again in a second")
        return busy(f"your tenant has its share of the {what} that may be in flight; come again in a second")


class Held:
    """What one request holds: the `count` of its bytes in memory, and its room. Its client is known once it has shown
    who it is."""

    def __init__(self, admission: Admission) -> None:
        self.client = ""
        self.count = 0
        self.room: list[Taking] = []
        self._admission = admission

    def hold(self, count: int) -> None:
        """Count more bytes, or fewer if below 0; raises Refusal if its client would hold more than is free then."""
        admission, client = self._admission, self.client
        own = admission.of_client[client] + count
        if count > 0 and own > admission.max_bytes - admission.held and admission.held > self.count:
            raise busy("too many large requests are in flight; come again in a second")
        admission.held += count
        admission.of_client[client] = own
        self.count += count

    def free(self) -> None:
        """Count none of its bytes any more, and give its room back."""
        for each in self.room:
            each.give()
        self.hold(-self.count)
        if not self._admission.of_client[self.client]:
            del self._admission.of_client[self.client]
