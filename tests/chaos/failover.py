"""Sentinels replace the master. Replication is asynchronous, so the new one may lack the last writes."""

from __future__ import annotations

import signal
import time

from tests.chaos.fault import Chaos, Struck
from tests.chaos.producers import Order
from tests.chaos.rewinding import reopen_since, run_again, wait_for_some
from tests.chaos.stack import OUTAGE
from tests.support.sentinels import Instance, Site

#: The replica receives nothing for this long before a master dies that takes its last writes with it (seconds).
_PARTED_S = (0.2, 2.0)
#: What a replica that follows may lack (seconds).
_LAG_S = 0.5
_LOOK_S = 0.1


def kill_master(chaos: Chaos) -> Struck | None:
    """Kill the master. It comes back as a replica."""
    return _kill(chaos, 0.0)


def kill_master_whose_replica_is_behind(chaos: Chaos) -> Struck | None:
    """The same, after its replica missed some writes."""
    return _kill(chaos, chaos.rng.uniform(*_PARTED_S))


def _kill(chaos: Chaos, lacks_s: float) -> Struck | None:
    """Kill the master, after its replica missed what was written in some seconds."""
    site = _ready(chaos)
    if site is None:
        return None
    waiters, began = wait_for_some(chaos), time.monotonic()
    if lacks_s:
        site.part()
        time.sleep(lacks_s)
    old = site.master
    chaos.stack.redis_up = False
    old.kill()
    hit = reopen_since(chaos, began - _LAG_S)

    def go_on() -> float | None:
        if not _has_left(site, old):
            return _LOOK_S
        old.server.start()
        site.forgive()
        chaos.stack.lead_to(site.master)
        run_again(chaos, hit, waiters)
        return None

    return Struck(f"its replica lacked {lacks_s:.1f} s; {len(hit)} jobs may have lost something", _LOOK_S, go_on)


def freeze_master(chaos: Chaos) -> Struck | None:
    """Stop the master until its replica has taken over. Until it is told, it answers to connections that it still has,
    and what it is told then is gone."""
    site = _ready(chaos)
    if site is None:
        return None
    waiters, began = wait_for_some(chaos), time.monotonic()
    old = site.master
    chaos.stack.redis_up = False
    old.send_signal(signal.SIGSTOP)
    hit = set(reopen_since(chaos, began - _LAG_S))
    woken = False

    def go_on() -> float | None:
        nonlocal woken
        if not woken and not _has_left(site, old):
            return _LOOK_S
        if not woken:
            # Before anybody can see that jobs are gone: they are not judged until their commands were run again.
            _reopen_more(chaos, hit, began - _LAG_S)
            chaos.stack.lead_to(site.master)
            old.send_signal(signal.SIGCONT)
            woken = True
        if not _follows(old):
            return _LOOK_S
        _reopen_more(chaos, hit, began - _LAG_S)
        run_again(chaos, hit, waiters)
        return None

    return Struck(f"{len(hit)} jobs may have lost something", _LOOK_S, go_on)


def _reopen_more(chaos: Chaos, hit: set[Order], moment: float) -> None:
    """Reopen the jobs that may have lost something by now; those of before stay held once."""
    for order in reopen_since(chaos, moment):
        if order in hit:
            chaos.producers.release(order)
        hit.add(order)


def _ready(chaos: Chaos) -> Site | None:
    """The sentinels' instances, if one follows the other."""
    site = chaos.stack.site
    return site if site is not None and chaos.redis_well and site.in_step() else None


def _has_left(site: Site, old: Instance) -> bool:
    try:
        return site.has_left(old)
    except OUTAGE:
        return False


def _follows(old: Instance) -> bool:
    return bool(old.replication().get("role") == "slave")
