"""What commands print with `--json`: one value, in one line unless it is an array."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta
from typing import Any

import click

from embedctl.cli.results import Summary
from embedctl.destinations.loop import Delivered
from embedctl.store import JobStatus, WorkerRow
from embedctl.terminal.job_facts import JobView
from embedctl.waiting.overview import Overview


def overview_json(overview: Overview) -> str:
    facts = {
        "at": overview.at,
        "live_workers": len(overview.workers),
        "rows_per_s": overview.rows_per_s,
        "tokens_per_s": overview.tokens_per_s,
        "chunks": overview.chunks,
        "active_jobs": overview.active_count,
        "redis_full_bytes": overview.full_bytes,
        "workers": [_worker(each.row) for each in overview.workers],
        "starting": overview.starting,
        "gone": overview.gone,
        "queues": overview.queues,
        "jobs": [
            {
                **job_form(pace.job),
                "records_per_s": pace.records_per_s,
                "tokens_per_s": pace.tokens_per_s,
                "seconds_left": pace.seconds_left,
            }
            for pace in (*overview.active, *overview.ended)
        ],
    }
    return json.dumps(facts, default=plain)


def view_json(view: JobView) -> str:
    facts = {
        **job_form(view.job),
        "workers": [_worker(worker) for worker in view.workers],
        "gone": view.gone,
        "suspects": view.suspects,
        "causes": view.causes,
    }
    return json.dumps(facts, default=plain)


def job_form(job: JobStatus) -> dict[str, Any]:
    return {**_facts(job), "stalled": job.stalled}


def result_json(job: JobStatus, summed_up: Summary, delivered: Delivered | None = None) -> str:
    """What a command made of a job: its facts, their summary, what became of its records, and the files written."""
    files = () if delivered is None else delivered.files
    facts = {**job_form(job), **asdict(summed_up), "files": [str(file) for file in files]}
    if delivered is not None and any(delivered.counts.values()):
        facts["delivered"] = delivered.counts
    return json.dumps(facts, default=plain)


@contextmanager
def printed_array() -> Iterator[Callable[[object], None]]:
    """Print an array item by item, each in a line, and hold none.

    After an error, the array is not closed: a part must not pass for the whole.
    """
    before = "["

    def add(item: object) -> None:
        nonlocal before
        click.echo(before + json.dumps(item, default=plain), nl=False)
        before = ",\n "

    yield add
    click.echo("[]" if before == "[" else "]")


def _worker(worker: WorkerRow) -> dict[str, Any]:
    return {**_facts(worker), "activity": worker.activity}


def _facts(value: Any) -> dict[str, Any]:
    """What a dataclass holds, one level deep: asdict copies all levels, which takes several times as long."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def plain(value: object) -> object:
    """What a value that JSON has no form for is written as."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if is_dataclass(value):
        return _facts(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
