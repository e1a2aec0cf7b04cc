"""Faults of jobs: error budgets that run out at a bad moment, cancelled jobs, and retries that die half-way."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

from embedctl import Job, JobNotFound, JobState
from embedctl_config import keys
from tests.chaos.fault import Chaos, Struck, killed_later
from tests.chaos.producers import Order
from tests.chaos.stack import FAR, OUTAGE

#: A retry that is to be killed half-way must get there within this time, or it is left alone (seconds).
_RETRY_S = 30.0
#: A producer must reach the point where it waits for room within this time, or its job is cancelled as it is (seconds).
_FULL_S = 30.0


def cancel_job(chaos: Chaos) -> Struck | None:
    order = chaos.producers.special("cancelled")
    if order is None:
        return None
    return Struck(f"job {order.plan.index}", chaos.rng.uniform(1.0, 6.0), lambda: _cancel(chaos, order))


def cancel_full_job(chaos: Chaos) -> Struck | None:
    """Cancel a job while its producer waits for room."""
    order = chaos.producers.special("cancelled-full")
    if order is None:
        return None
    until = time.monotonic() + _FULL_S

    def when_full() -> float | None:
        try:
            waits = _waits_for_room(chaos, order)
        except OUTAGE:
            waits = False
        return _cancel(chaos, order) if waits or time.monotonic() > until else 0.1

    return Struck(f"job {order.plan.index}", 1.0, when_full)


def _waits_for_room(chaos: Chaos, order: Order) -> bool:
    if order.job_id is None or not order.running:
        return False
    waiting = chaos.stack.raw.hget(keys.job(order.job_id), "waiting_bytes")
    return waiting is not None and int(waiting) > (order.plan.high_water or 0)


def _cancel(chaos: Chaos, order: Order) -> float | None:
    """Cancel an order's job. Return the seconds after which to try again, or None."""
    # Cancelling frees the key: a producer that runs again would make another job.
    again = order.runs > 1 and order.submitting
    if order.settled or (order.job_id is None and not order.submitting):
        return None
    if order.job_id is None or again:
        return 0.3
    order.cancelling = True
    try:
        order.cancelled = cancel_all(chaos, order)
    except OUTAGE:
        return 0.5
    order.cancelling = order.cancelled
    return None


def cancel_all(chaos: Chaos, order: Order) -> bool:
    """Cancel every job that an order made. Return whether one was cancelled, or none is left.

    Raises:
        BrokerUnavailable: Redis can't be reached.
    """
    states = []
    for job_id in order.ids:
        try:
            states.append(Job(job_id, chaos.stack.broker).cancel().state)
        except JobNotFound:
            continue
    return JobState.CANCELLED in states or not states


def submit_special(chaos: Chaos, kind: str) -> Struck | None:
    """Submit a job of this kind, which has an error budget."""
    order = chaos.producers.special(kind)
    return None if order is None else Struck(f"job {order.plan.index}, at most {order.plan.max_errors}")


def kill_retry(chaos: Chaos) -> Struck | None:
    """Kill `embedctl retry` between its steps. Later, run the same retry or the same submission again."""
    order = _retriable(chaos)
    if order is None:
        if all(order.settled for order in chaos.producers.orders if order.plan.kind == "retried"):
            chaos.producers.special("retried")  # for the next time
        return None
    retry = chaos.producers.retry(order)
    killed = _kill_half_way(chaos, order, retry)
    by_submission = chaos.rng.random() < 0.5

    def go_on() -> None:
        if by_submission:
            chaos.producers.submit_again(order)
            chaos.producers.release(order)
        else:
            chaos.producers.retry_again(order)

    how = "half-way" if killed else "after its end"
    then = "submitted" if by_submission else "retried"
    return Struck(f"job {order.plan.index}, {how}; then {then} again", chaos.short(), go_on)


def kill_drainer(chaos: Chaos) -> Struck | None:
    """Drain a job, also while it runs, and kill the drainer. What it has not drained stays in Redis; the next strike at
    the same job goes on."""
    drained = [order for order in chaos.producers.orders if order.job_id is not None and not order.plan.frees_key]
    if not drained:
        return None
    order = chaos.rng.choice(drained[-8:])
    chaos.drained.add(str(order.job_id))
    drainer = chaos.stack.spawn(
        ["embedctl", "fetch", str(order.job_id), "-o", f"parts-{order.job_id}/", "-q"],
        log_file=chaos.stack.folder / "drainers.log",
        link=FAR,
        variables={"LIMIT_PART_RECORDS": "500"},
    )
    return killed_later(drainer, f"of job {order.plan.index}", chaos.short())


def _retriable(chaos: Chaos) -> Order | None:
    """A job that ended with errors and passed its check."""
    orders = [
        order
        for order in chaos.producers.orders
        if order.settled
        and order.plan.kind in ("poison", "retried")
        and order.plan.index not in chaos.monitor.verdicts
        and order.job_id is not None
    ]
    chaos.rng.shuffle(orders)
    for order in orders[:20]:
        left_ms = chaos.stack.raw.pttl(keys.job(str(order.job_id)))
        if left_ms > 2 * 1000 * _RETRY_S:  # the retry, and the start of the command that goes on
            return order
    return None


def _kill_half_way(chaos: Chaos, order: Order, retry: subprocess.Popen[bytes]) -> bool:
    """Kill a retry after it opened the job and before it closed it. Return whether the kill came in time."""
    deadline = time.monotonic() + _RETRY_S
    opened = False
    while retry.poll() is None and not opened and time.monotonic() < deadline:
        time.sleep(0.002)
        with suppress(*OUTAGE):
            opened = chaos.stack.raw.hget(keys.job(str(order.job_id)), "sealed") == b"0"
    time.sleep(chaos.rng.uniform(0.0, 0.04))
    retry.kill()
    retry.communicate()
    try:
        return bool(chaos.stack.raw.hget(keys.job(str(order.job_id)), "sealed") == b"0")
    except OUTAGE:
        return opened
