"""Wrong keys, by the address that they come from."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

#: So many wrong keys of an address are answered at once, and then one in each of these seconds.
_AT_ONCE, _EVERY_S = 20, 1.0
#: The longest pause (seconds).
_LONGEST_S = 10.0
#: Most addresses that are remembered.
_MOST = 10_000


class Guesses:
    """Tells how long the answer to a wrong key waits. A client that guesses keys so takes little time of the gateway.
    Clients with a right key never wait, not even at the same address."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        #: Address → when all of its guesses are paid for, each with its seconds; the address that guessed last is last.
        self._paid_at: OrderedDict[str, float] = OrderedDict()

    def pause_s(self, address: str) -> float:
        """The pause before a wrong key from this address is answered (seconds), which is counted."""
        network, now = _network_of(address), self._now()
        free_s = _AT_ONCE * _EVERY_S
        paid_at = min(max(now, self._paid_at.pop(network, now)) + _EVERY_S, now + free_s + _LONGEST_S)
        self._paid_at[network] = paid_at
        if len(self._paid_at) > _MOST:
            self._paid_at.popitem(last=False)
        return max(0.0, paid_at - now - free_s)


def _network_of(address: str) -> str:
    """An address, or of IPv6 the network, all of whose addresses one client may use."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 6 and found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return str(found) if found.version == 4 else str(int(found) >> 64)
