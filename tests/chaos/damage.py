"""Damages keys of a job while others go on: that job must end, and nothing else may suffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embedctl import enqueue_embeddings
from embedctl_config import keys
from tests.chaos.fault import Chaos, Struck
from tests.chaos.options import DUMMY
from tests.chaos.stack import DAMAGED, OUTAGE

#: So many chunks: most of them still wait when the job is damaged.
_CHUNKS = 60
#: A damaged job must have ended at one of so many looks, which are so far apart (seconds).
_LOOKS, _LOOK_S = 120, 0.5
_ENDED = (b"failed", b"completed", b"completed_with_errors")


def _retyped(key: Callable[[str], str]) -> Callable[[Any, str, float], object]:
    return lambda raw, job_id, ttl_s: raw.set(key(job_id), "damage", px=int(ttl_s * 1000))


def _edited(field: str, value: str) -> Callable[[Any, str, float], object]:
    return lambda raw, job_id, _: raw.hset(keys.job(job_id), field, value)


def _deleted(field: str) -> Callable[[Any, str, float], object]:
    return lambda raw, job_id, _: raw.hdel(keys.job(job_id), field)


_DAMAGES = {
    "ready is a string": _retyped(keys.ready),
    "owners is a string": _retyped(keys.owners),
    "attempts is a string": _retyped(keys.attempts),
    "its lane is unknown": _edited("lane", "none"),
    "next is no number": _edited("next", "x"),
    "its class is gone": _deleted("hardware"),
    "its number of chunks is gone": _deleted("added"),
}


def damage_job(chaos: Chaos) -> Struck | None:
    """Submit a job, and damage one of its keys."""
    stack = chaos.stack
    if stack.options.model != DUMMY or not chaos.redis_well:
        return None
    what = chaos.rng.choice(sorted(_DAMAGES))
    texts = [f"damaged {at}" for at in range(_CHUNKS)]
    job = enqueue_embeddings(
        texts,
        model=DUMMY,
        hardware="slow",
        chunk_size=1,
        ttl=stack.options.ttl,
        tenant=DAMAGED,
        settings=stack.settings,
    )
    _DAMAGES[what](stack.raw, job.id, stack.options.ttl)
    restarts, looks = len(stack.redis_restarts), 0

    def see_off() -> float | None:
        nonlocal looks
        looks += 1
        try:
            state = stack.raw.hget(keys.job(job.id), "state")
            # After a restart, Redis may hold it as it was before.
            if state not in (None, *_ENDED) and len(stack.redis_restarts) == restarts and looks < _LOOKS:
                return _LOOK_S
            _remove(stack.raw, job.id)
        except OUTAGE:
            return _LOOK_S
        if looks == _LOOKS:
            chaos.monitor.unended.append(f"job {job.id} is still {state.decode()}, although {what}")
        return None

    return Struck(what, _LOOK_S, see_off)


def _remove(raw: Any, job_id: str) -> None:
    for key in raw.scan_iter(match=f"embed:job:{job_id}*", count=1000):
        raw.unlink(key)
    for members in (keys.ACTIVE, keys.JOBS, keys.UPKEEP):
        raw.zrem(members, job_id)
