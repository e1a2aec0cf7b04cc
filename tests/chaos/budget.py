"""Checks a job that its error budget ended: it must give the reason, and its results so far must be readable."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from embedctl import Job, JobFailed, JobState, JobStatus
from embedctl.queueing.broker import Broker
from embedctl_config import keys, wire
from embedctl_config.wire import ErrorCode
from tests.chaos.check import Verdict, check_codes, check_vectors, freed, is_spent
from tests.chaos.jobs import Expected, Plan


def check_stopped(job: Job, broker: Broker, raw: Any, plan: Plan, expected: Expected) -> Verdict:
    """Compare a job that its budget ended with its expected results.

    Raises:
        JobNotFound, JobLost, BrokerUnavailable: as the library does.
    """
    verdict = Verdict()
    status = job.status()
    verdict.must_be("state", status.state, JobState.FAILED)
    verdict.must_be("stopped_by", status.stopped_by, "max_errors")
    verdict.must_be("whether its budget was spent", is_spent(plan, status.failed, status.records), True)
    failed = _check_stored(broker, status, expected, verdict)
    verdict.must_be("status.failed", status.failed, len(failed))
    verdict.must_be("positions of iter_errors()", [each.position for each in job.iter_errors()], sorted(failed))
    _check_readable(job, status.chunks, verdict)
    verdict.must_be("text kept", not freed(raw, job.id, results=False), False)
    for key in (keys.leases(job.id), keys.ready(job.id), keys.owners(job.id)):
        verdict.must_be(f"{key.rpartition(':')[2]} kept", raw.exists(key), 0)
    return verdict


def _check_stored(broker: Broker, status: JobStatus, expected: Expected, verdict: Verdict) -> dict[int, ErrorCode]:
    """Check each stored result, wherever it is in the job. Return the codes of the failed records."""
    failed: dict[int, ErrorCode] = {}
    seen: Counter[int] = Counter()
    for chunk in range(status.chunks):
        data = broker.jobs.result(status.id, chunk)
        if data is None:
            continue
        result = wire.decode_result(data)
        positions = (
            list(result.positions) if result.positions else list(range(result.first, result.first + result.rows))
        )
        if chunk < (status.original_chunks or status.chunks):  # later chunks hold retried records
            seen.update(positions)
        failed.update({positions[each.row]: each.code for each in result.errors})
        vectors = np.frombuffer(result.vectors, result.dtype).reshape(result.rows, result.dim)
        check_vectors(vectors, positions, failed, expected, verdict)
    verdict.doubled += sum(count - 1 for count in seen.values())
    if seen:
        check_codes(failed, expected, verdict, list(seen))
    return failed


def _check_readable(job: Job, chunks: int, verdict: Verdict) -> None:
    """The results up to the first missing one must be readable; then the error must give the reason."""
    read, told = 0, ""
    try:
        for _ in job.iter_results():
            read += 1
    except JobFailed as error:
        told = str(error)
    if not told:
        verdict.must_be("chunks read of a job that told no reason", read, chunks)
    else:
        verdict.must_be("whether the budget is told as the reason", "budget" in told, True)
