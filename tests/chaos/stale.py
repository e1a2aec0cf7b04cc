"""A worker comes back with the result of a text that no longer belongs to the job.

Redis forgot that the chunk was added. The corpus had changed after the part that Redis still knows, so the producer
put another text in the chunk's place. That is allowed. Storing the old text's vectors under the new text's ids is not.
"""

from __future__ import annotations

import signal
import time

from embedctl_config import keys
from tests.chaos.fault import Chaos, Struck
from tests.chaos.producers import Order
from tests.chaos.rewinding import History, rewind
from tests.chaos.stack import OUTAGE, Worker

_STEP_S = 0.02
#: A worker must hold a chunk of the job within this time (seconds).
_HELD_S = 15.0
#: The producer may add again once its own lease has lapsed. It must have added within this time (seconds).
_ADDED_S = keys.PRODUCER_LEASE_S + 30.0
#: The other workers of the class stay stopped for this long, so that the stale result comes first (seconds).
_ALONE_S = 3.0


def return_with_a_stale_result(chaos: Chaos) -> Struck | None:
    workers = [worker for worker in chaos.stack.workers if worker.hardware == "slow"]
    if (
        not chaos.redis_well
        or chaos.stack.site is not None
        or not workers
        or any(worker.frozen or not worker.alive for worker in workers)
    ):
        return None
    order = chaos.producers.special("slowly")
    found = None if order is None else _wait_for_holder(chaos, order, workers)
    if order is None or found is None:
        return None
    holder, chunk, history, moment, added = found
    for worker in workers:
        worker.signal(signal.SIGSTOP)
    struck = rewind(chaos, history, moment)
    if struck is None or struck.undo is None:
        _wake(workers)
        return None
    # Nothing can be added at this moment: Redis is away.
    chaos.producers.change_corpus(order, added * (order.plan.chunk_size or 1))
    for process in list(order.running):
        process.kill()
    start, until = struck.undo, time.monotonic() + _ADDED_S
    state = {"started": False}

    def mend() -> float | None:
        if not state["started"]:
            start()
            state["started"] = True
        if _added(chaos, order) <= chunk and time.monotonic() < until:
            return _STEP_S
        if holder.frozen:
            holder.signal(signal.SIGCONT)
            return _ALONE_S
        _wake(workers)
        return None

    return Struck(f"chunk {chunk} of job {order.plan.index}, changed from chunk {added}", struck.after_s, mend)


def _wait_for_holder(
    chaos: Chaos, order: Order, workers: list[Worker]
) -> tuple[Worker, int, History, float, int] | None:
    """Wait until one of these workers holds a chunk of the job, while the job's producer still submits.

    Returns:
        The worker, the chunk, the history of Redis' file, a moment before the chunk was added, and the number of chunks
        added by then.
    """
    history = History(chaos.stack)
    moments: list[tuple[float, int]] = []
    until = time.monotonic() + _HELD_S
    while time.monotonic() < until and (order.running or order.job_id is None):
        time.sleep(_STEP_S)
        moments.append((time.monotonic(), _added(chaos, order)))
        history.note()
        held = chaos.stack.raw.hgetall(keys.owners(order.job_id)) if order.job_id is not None else {}
        for chunk, owner in held.items():
            holder = _worker_of(chaos, workers, owner.split(b" ")[1].decode())
            before = [(at, added) for at, added in moments if 0 < added <= int(chunk)]
            if holder is not None and before:
                return holder, int(chunk), history, *before[-1]
    return None


def _worker_of(chaos: Chaos, workers: list[Worker], instance: str) -> Worker | None:
    pids = {row.instance: row.pid for row in chaos.stack.broker.workers.alive()}
    return next((worker for worker in workers if worker.pid == pids.get(instance)), None)


def _added(chaos: Chaos, order: Order) -> int:
    """The number of chunks added to the job; 0 if that is unknown."""
    if order.job_id is None:
        return 0
    try:
        return int(chaos.stack.raw.hget(keys.job(order.job_id), "added") or 0)
    except OUTAGE:
        return 0


def _wake(workers: list[Worker]) -> None:
    for worker in workers:
        if worker.frozen:
            worker.signal(signal.SIGCONT)
