"""Overviews and jobs as JSON, one object in a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from embedctl.overview import Overview
from embedctl.store import JobStatus, WorkerRow
from embedctl.terminal.job_facts import JobView


def overview_json(overview: Overview) -> str:
    """The sums, workers, queues and jobs."""
    facts = {
        "at": overview.at,
        "live_workers": len(overview.workers),
        "rows_per_s": overview.rows_per_s,
        "tokens_per_s": overview.tokens_per_s,
        "tickets": overview.tickets,
        "active_jobs": overview.active_count,
        "workers": [_worker(each.row) for each in overview.workers],
        "gone": [asdict(each) for each in overview.gone],
        "queues": [asdict(queue) for queue in overview.queues],
        "jobs": [
            {
                **_job(pace.job),
                "records_per_s": pace.records_per_s,
                "tokens_per_s": pace.tokens_per_s,
                "seconds_left": pace.seconds_left,
            }
            for pace in (*overview.active, *overview.ended)
        ],
    }
    return json.dumps(facts, default=_value)


def view_json(view: JobView) -> str:
    """A job with its workers and its suspect chunks."""
    return job_json(
        view.job,
        workers=[_worker(worker) for worker in view.workers],
        gone=[asdict(each) for each in view.gone],
        suspects=[asdict(each) for each in view.suspects],
    )


def job_json(job: JobStatus, **more: Sequence[Any]) -> str:
    """A job's facts, and more fields."""
    return json.dumps({**_job(job), **more}, default=_value)


def _job(job: JobStatus) -> dict[str, Any]:
    return {**asdict(job), "stalled": job.stalled}


def _worker(worker: WorkerRow) -> dict[str, Any]:
    return {**asdict(worker), "activity": worker.activity}


def _value(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} has no JSON form")
