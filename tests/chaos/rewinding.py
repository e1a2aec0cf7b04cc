"""Rewinds Redis to an earlier moment, as a failover may: the last writes are gone, and all earlier ones are kept.

Every job that this may have hit must end once its command is run again. Clients that wait for such a job must not wait
for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from embedctl import EmbedctlError, Job, JobError, JobNotFound, WaitTimeout
from embedctl_config import keys
from tests.chaos.fault import Chaos, Struck
from tests.chaos.faults_of_jobs import cancel_all
from tests.chaos.producers import Order
from tests.chaos.stack import OUTAGE, Stack
from tests.support.redis_server import Written

#: Redis forgets the writes of this much time (seconds).
_FORGOTTEN_S = (0.2, 2.0)
#: Redis is away for this long (seconds): a failover is quick, and workers hold their results meanwhile.
_AWAY_S = (0.0, 1.5)
#: Most jobs that get a waiter. Their producers run again only after the waiter got its error.
_MOST_WAITERS = 3
_STEP_S = 0.05
#: A slow submission is complete within this time (seconds).
_SUBMITTED_S = 20.0


def told_within_s(stack: Stack) -> float:
    """A client that waits for a job that can't end unless someone acts gets an error within this time (seconds)."""
    return keys.PRODUCER_LEASE_S + 4 * stack.options.lease + 30.0


@dataclass
class Waiter:
    """A client that waits for a job in a thread. It starts before Redis forgets."""

    stack: Stack
    job_id: str
    told: str = ""
    ended: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._wait, name="waiter", daemon=True)
        self._thread.start()

    def hangs(self) -> bool:
        """Wait for the waiter's thread to end. True if it got neither an end nor an error, although the job makes no
        progress."""
        self._thread.join()
        return not self.told and not self.ended

    def _wait(self) -> None:
        job = Job(self.job_id, self.stack.broker)
        while not self.told and not self.ended:
            try:
                job.wait(timeout=told_within_s(self.stack) + 1.0)
                self.ended = True
            except WaitTimeout:
                # The time limit counts from the last return of Redis.
                since_s = time.monotonic() - self.stack.redis_restarts[-1]
                if not _goes_on(job) and since_s > told_within_s(self.stack):
                    return
            except JobError as error:
                self.told = f"{type(error).__name__}: {error}"
            except EmbedctlError:
                time.sleep(1.0)  # an outage longer than the waiter's patience


def _goes_on(job: Job) -> bool:
    """Whether waiting makes sense: the job has a producer, or records that are still to be encoded."""
    try:
        status = job.status()
    except (JobNotFound, *OUTAGE):
        return True  # the next wait raises the error
    return not status.stalled or status.done + status.failed < status.records


def rewind_redis(chaos: Chaos) -> Struck | None:
    """Kill Redis, and start it again with its data of a moment earlier."""
    if not chaos.redis_well or chaos.stack.site is not None:
        return None
    forgotten_s = chaos.rng.uniform(*_FORGOTTEN_S)
    history = History(chaos.stack)
    until = time.monotonic() + forgotten_s
    if chaos.rng.random() < 0.6:
        order = chaos.producers.special("slowly")
        until = time.monotonic() + (0 if order is None else _SUBMITTED_S)
        history.watch(until, lambda: order is not None and not order.submitting)
    else:
        history.watch(until)
    return rewind(chaos, history, time.monotonic() - forgotten_s)


def rewind(chaos: Chaos, history: History, moment: float) -> Struck | None:
    """Kill Redis and make it forget everything since a moment. The undo starts it and runs the commands again."""
    stack, rng = chaos.stack, chaos.rng
    waiters = wait_for_some(chaos)
    stack.stop_redis(kill=True)
    since = history.forget(moment)
    if since is None:
        stack.start_redis()
        return None
    forgotten_s = time.monotonic() - since
    hit = reopen_since(chaos, since)

    def start() -> None:
        stack.start_redis()
        run_again(chaos, hit, waiters)

    words = f"by {forgotten_s:.1f} s; {len(hit)} jobs may have lost something, {len(waiters)} are waited for"
    return Struck(words, rng.uniform(*_AWAY_S), start)


class History:
    """Lengths of Redis' append-only file at some moments."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._moments: list[tuple[float, Written]] = []
        self.note()

    def watch(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Note the length repeatedly, until a given time or until `enough` is true."""
        while time.monotonic() < until and not enough():
            time.sleep(_STEP_S)
            self.note()

    def forget(self, moment: float) -> float | None:
        """Make a stopped Redis forget everything since a moment, or a little more. Return the moment from which it
        forgot, or None if that is not possible."""
        if not self._moments:
            return None
        at, written = max([each for each in self._moments if each[0] <= moment] or self._moments[:1])
        return at if self._stack.redis.rewind(written) else None

    def note(self) -> None:
        """Note the file's length now."""
        # Take the time first: everything written by then is in the file.
        at = time.monotonic()
        written = self._stack.redis.written()
        if written is not None:
            self._moments.append((at, written))


def wait_for_some(chaos: Chaos) -> dict[Order, Waiter]:
    """Start clients that wait for a few jobs under way."""
    return {order: Waiter(chaos.stack, str(order.job_id)) for order in _some_under_way(chaos)}


def reopen_since(chaos: Chaos, moment: float) -> list[Order]:
    """Mark as open all jobs that may have lost something if Redis forgets what it was told since that moment."""
    hit = [order for order in chaos.producers.orders if not order.settled or (order.settled_at or 0) >= moment]
    for order in hit:
        order.reopen()
        order.rewound = True
        chaos.producers.hold(order)  # a job is not judged before its command was run again
    return hit


def run_again(chaos: Chaos, orders: Iterable[Order], waiters: Mapping[Order, Waiter]) -> None:
    """Run the commands of jobs again, each in a thread of its own, after its waiter got its error."""
    for order in orders:
        chaos.producers.in_thread(partial(_run_again, chaos, order, waiters.get(order)))


def _some_under_way(chaos: Chaos) -> list[Order]:
    """A few jobs under way. Jobs whose producers have just ended come first: those producers will not notice."""
    found = [
        order
        for order in chaos.producers.orders
        if order.job_id is not None and not order.settled and not order.cancelling and not order.plan.frees_key
    ]
    return sorted(found, key=lambda order: (order.submitting, order.ended))[:_MOST_WAITERS]


def _run_again(chaos: Chaos, order: Order, waiter: Waiter | None) -> None:
    """Do what the user of a job does: run its command again, at once or once the waiter gets its error."""
    if waiter is not None and waiter.hangs():
        chaos.monitor.unended.append(
            f"who waits for job {order.plan.index} ({waiter.job_id}) was not told within "
            f"{told_within_s(chaos.stack):g} s that Redis forgot the end of its submission"
        )
    while order.running and not chaos.producers.abandoned:
        time.sleep(_STEP_S)
    if order.cancelled:
        _cancel_again(chaos, order)
    elif not order.cancelling:
        chaos.producers.submit_again(order)
    chaos.producers.release(order)


def _cancel_again(chaos: Chaos, order: Order) -> None:
    while not chaos.producers.abandoned:
        try:
            cancel_all(chaos, order)
            return
        except OUTAGE:
            time.sleep(0.5)
