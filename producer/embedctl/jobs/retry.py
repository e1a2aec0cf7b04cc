"""Queueing the failed records of a job again."""

from __future__ import annotations

import secrets
from functools import partial

from embedctl.queueing.retrying import TimeLimit
from embedctl.store import JobState
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import CorpusChanged, JobCancelled, JobError, JobLost

#: Chunks whose counts are asked for together.
_SLICE = 500


def retry_failed(waiter: Waiter, limit: TimeLimit) -> int:
    """Move the failed records of an ended job into new chunks, and queue these; see :meth:`Job.retry_failed`."""
    ask = partial(waiter.ask, deadline=limit.deadline)
    job_id, broker = waiter.job_id, waiter.broker
    status = ask(waiter.status)
    if status.state is JobState.CANCELLED:
        raise JobCancelled(f"job {job_id} was cancelled: submit its corpus again")
    if status.stopped_by is not None:
        raise broker.jobs.why_stopped(job_id)
    token = secrets.token_hex(8)
    chunks, retried = status.chunks, 0
    for start in range(0, status.chunks, _SLICE):
        if retried:  # a long stretch without failures must not cost this process its right to add
            ask(partial(broker.jobs.hold, job_id, token))
        count = min(_SLICE, status.chunks - start)
        for chunk in ask(partial(broker.jobs.failed_chunks, job_id, start, count)):
            records = ask(partial(broker.jobs.retry, job_id, chunk, chunks, token))
            if records:
                retried += records
                chunks += 1
    if retried or (status.original_chunks is not None and not status.sealed):
        _seal(waiter, limit, chunks, retried)
    return retried


def _seal(waiter: Waiter, limit: TimeLimit, chunks: int, retried: int) -> None:
    try:
        waiter.ask(partial(waiter.broker.jobs.seal, waiter.job_id, chunks), limit.deadline)
    except CorpusChanged as error:
        if not retried:
            raise JobError(f"job {waiter.job_id} was being retried by another process") from error
        if waiter.ask(waiter.status, limit.deadline).chunks >= chunks:
            return  # this process stood still, so its retry was closed for it, and another one retried more since then
        raise JobLost(f"Redis lost the retry of job {waiter.job_id}: retry its failed records once more") from error
