"""Kills under `embedctl up`, whose workers are killed by records too: at the moments that matter to quarantine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from embedctl_config import keys
from tests.chaos.fault import Chaos, Struck
from tests.chaos.jobs import KILLERS
from tests.chaos.options import DUMMY
from tests.chaos.stack import GUARDED, OUTAGE, Worker
from tests.support.processes import children, command_line

#: The moment must come within this time, or nothing is killed (seconds).
_MOMENT_S = 60.0
_LOOK_S = 0.02
_MOST_UNDER_WAY = 2
#: So many jobs of one tenant, each with a text that kills: three deaths in a minute make it distrusted.
_KILLERS = 5

#: Finds the process that is to be killed now, among a supervisor and its children; None if the moment has not come.
Find = Callable[[Chaos, Worker], int | None]


def _kill(chaos: Chaos, find: Find) -> Struck | None:
    """Submit a job with records that kill workers, and kill a process when its moment comes."""
    up = next((worker for worker in chaos.stack.workers if worker.hardware == GUARDED), None)
    under_way = sum(each.plan.kind == "guarded" and not each.settled for each in chaos.producers.orders)
    # Each such record takes the start of two processes in quarantine, which the whole machine slows down.
    if up is None or under_way >= _MOST_UNDER_WAY or (order := chaos.producers.special("guarded")) is None:
        return None
    until = time.monotonic() + _MOMENT_S

    def when_it_comes() -> float | None:
        try:
            found = find(chaos, up) if up.alive else None
        except OUTAGE:
            found = None
        if found is None:
            return _LOOK_S if time.monotonic() < until and not order.settled else None
        if found == up.pid:
            up.signal(signal.SIGKILL)
        else:
            _kill_child(up, found)
        chaos.guarded_kills += 1
        return None

    return Struck(f"while job {order.plan.index} runs", _LOOK_S, when_it_comes)


def _kill_child(up: Worker, pid: int) -> None:
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if pid in children(up.pid):  # and no other process that has its number meanwhile
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _with_chunks(chaos: Chaos, up: Worker, *, quarantine: bool) -> int | None:
    rows, owners = up.among(chaos.stack.rows()), chaos.stack.owners()
    return next((row.pid for row in rows if row.quarantine is quarantine and row.instance in owners), None)


def _loading(chaos: Chaos, up: Worker) -> int | None:
    rows = chaos.stack.rows()
    unknown = (pid for pid in children(up.pid) if pid not in rows)
    return next((pid for pid in unknown if b"--quarantine" in command_line(pid)), None)


def _with_suspects(chaos: Chaos, up: Worker) -> int | None:
    raw = chaos.stack.raw
    jobs = [name.decode() for name in raw.zrange(keys.ACTIVE, 0, -1)]
    waiting = (raw.hget(keys.job(job), "hardware") for job in jobs if raw.exists(keys.suspects(job)))
    return up.pid if GUARDED.encode() in waiting else None


def submit_killers(chaos: Chaos) -> Struck | None:
    """Submit several jobs of one tenant, each of one chunk that kills, beside a job of another tenant."""
    under_way = any(each.plan.kind == "killer" and not each.settled for each in chaos.producers.orders)
    if under_way or all(worker.hardware != GUARDED for worker in chaos.stack.workers):
        return None
    orders = [chaos.producers.special(kind) for kind in ("beside", *["killer"] * _KILLERS)]
    told, until = keys.faults(f"{keys.queue(GUARDED, DUMMY)}:{KILLERS}"), time.monotonic() + _MOMENT_S

    def until_it_is_distrusted() -> float | None:
        try:
            found = int(chaos.stack.raw.hget(told, "distrusted_ms") or 0) > chaos.stack.broker.connection.now_ms()
        except OUTAGE:
            found = False
        chaos.distrusts += found
        return None if found or time.monotonic() > until or all(each.settled for each in orders if each) else 0.25

    return Struck(f"{_KILLERS} jobs of tenant {KILLERS}", 0.25, until_it_is_distrusted)


kill_worker_with_chunks = partial(_kill, find=partial(_with_chunks, quarantine=False))
kill_quarantine_with_chunks = partial(_kill, find=partial(_with_chunks, quarantine=True))
kill_quarantine_that_loads = partial(_kill, find=_loading)
kill_supervisor_with_suspects = partial(_kill, find=_with_suspects)
