"""Slow links: everything arrives, but late."""

from __future__ import annotations

from tests.chaos.fault import Chaos, Struck
from tests.chaos.options import DUMMY
from tests.chaos.stack import THIN, WIDE

_BYTES_PER_S, _DELAY_S = 1e6, 0.05
#: How long a link stays slow (seconds).
_SLOW_S = (10.0, 40.0)


def slow_proxy(chaos: Chaos) -> Struck | None:
    """Slow down all traffic through the proxy for a while."""
    proxy = chaos.stack.proxy
    if proxy.rate is not None:
        return None
    proxy.rate, proxy.delay_s = _BYTES_PER_S, _DELAY_S
    seconds = chaos.rng.uniform(*_SLOW_S)

    def quick_again() -> None:
        proxy.rate, proxy.delay_s = None, 0.0

    return Struck(f"1 MB/s and 50 ms for {seconds:.0f} s", seconds, quick_again)


def submit_wide_job(chaos: Chaos) -> Struck | None:
    """Submit a job whose results are too large for its worker's uplink to carry within a connection's timeout."""
    if chaos.stack.options.model != DUMMY:
        return None
    if any(order.plan.kind == "wide" and not order.settled for order in chaos.producers.orders):
        return None
    if not any(worker.hardware == WIDE for worker in chaos.stack.workers):
        chaos.stack.add_worker(WIDE, THIN)
    order = chaos.producers.special("wide")
    return None if order is None else Struck(f"job {order.plan.index}")
