"""Faults of the place outside of Redis that keeps the bytes of chunks."""

from __future__ import annotations

from embedctl.queueing.sweeper import Sweeper
from embedctl_config import keys
from tests.chaos.fault import Chaos, Struck
from tests.chaos.stack import OUTAGE, Stack

#: Longer than every outage of a run, and so longer than anything takes between putting bytes and noting them (seconds).
_GRACE_S, _AGAIN_S = 150.0, 10.0
#: Rounds of the sweeper at the end, each of a few seconds.
_MOST_ROUNDS = 30


def leave_place(chaos: Chaos) -> Struck | None:
    """Take the place away for a while."""
    place = chaos.stack.chunk_place
    if not place.environment or place.away:
        return None
    place.leave()
    seconds = chaos.short()
    return Struck(f"away for {seconds:.1f} s", seconds, place.return_)


def sweep_place(chaos: Chaos) -> Struck | None:
    """Sweep much earlier than the product does."""
    place = chaos.stack.chunk_place
    if not place.environment or place.away or not chaos.redis_well:
        return None
    sweeper = chaos.sweeper
    if sweeper is None:
        sweeper = chaos.sweeper = _sweeper(chaos.stack, _GRACE_S, _AGAIN_S)
    try:
        chaos.stack.raw.delete(keys.SWEEP)
        return Struck(f"{sweeper.round()} names removed")
    except OUTAGE:
        return None


def bytes_left(stack: Stack) -> int:
    """How many folders the sweeper leaves when no job is left."""
    if not stack.chunk_place.environment:
        return 0
    sweeper = _sweeper(stack, 0.0, 0.0)
    left = 1
    for _ in range(_MOST_ROUNDS):
        stack.raw.delete(keys.SWEEP)
        sweeper.round()
        left = sum(1 for _ in stack.broker.chunk_files.list(""))
        if not left:
            break
    return left


def _sweeper(stack: Stack, grace_s: float, again_s: float) -> Sweeper:
    return Sweeper(stack.broker, grace_s=grace_s, rest_s=0.0, again_s=again_s)
