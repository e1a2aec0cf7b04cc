"""The code of the programs: the real client code, called as its usual callers call it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from embedctl.broker import Broker
from embedctl.enqueue import JobOptions, submit
from embedctl.job import Job
from embedctl.reaper import Reaper
from embedctl.records import records_of
from tests.explorer.actors import Body


def corpus(*words: str) -> list[str]:
    """Two records per word; each word makes one chunk."""
    return [f"{word} {chunk} {row}" for chunk, word in enumerate(words) for row in range(2)]


def submits(texts: Sequence[str], keep: Sequence[str] = ()) -> Body:
    """A producer: it submits a corpus to the job, or the missing part of it, and waits for the end.

    Args:
        keep: names of kept fields. Each holds the record's text.
    """
    items = [{"text": text, **dict.fromkeys(keep, text)} for text in texts]

    def body(broker: Broker, job_id: str) -> str:
        records = records_of(items, keep=keep, max_bytes=1000)
        return str(submit(broker, records, JobOptions(resume=job_id, keep=keep)).wait().state)

    return body


def waits(job_type: Callable[[str, Broker], Any] = Job) -> Body:
    return lambda broker, job_id: str(job_type(job_id, broker).wait().state)


def fetches(broker: Broker, job_id: str) -> Any:
    """Positions and failures of all results of a job."""
    seen: list[int] = []
    for chunk in Job(job_id, broker).iter_results():
        seen += chunk.positions.tolist()
    return tuple(seen)


def cancels(job_type: Callable[[str, Broker], Any] = Job) -> Body:
    return lambda broker, job_id: str(job_type(job_id, broker).cancel().state)


def stops(broker: Broker, job_id: str) -> str:
    return str(Job(job_id, broker).stop().state)


def retries(job_type: Callable[[str, Broker], Any] = Job) -> Body:
    return lambda broker, job_id: job_type(job_id, broker).retry_failed()


def looks_after(broker: Broker, job_id: str) -> None:
    """A reaper's look after the jobs that are due."""
    Reaper(broker)._look_after_due(broker.connection.now_ms(), math.inf)


def sweeps(broker: Broker, job_id: str) -> None:
    """A reaper's sweep: it finds the jobs that the agenda lacks."""
    broker.upkeep.agenda.sweep(broker.connection.now_ms())
