"""What programs do: the real client code, each piece as its callers call it."""

from __future__ import annotations

import inspect
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
    """Two records for each word: a chunk of its own."""
    return [f"{word} {chunk} {row}" for chunk, word in enumerate(words) for row in range(2)]


def submits(texts: Sequence[str]) -> Body:
    """A producer: it submits a corpus to the job, or what of it is missing, and waits for the end."""

    def body(broker: Broker, job_id: str) -> str:
        return str(submit(broker, records_of(texts, max_bytes=1000), JobOptions(resume=job_id)).wait().state)

    return body


def waits(job_type: Callable[[str, Broker], Any] = Job) -> Body:
    return lambda broker, job_id: str(job_type(job_id, broker).wait().state)


def fetches(broker: Broker, job_id: str) -> Any:
    """Positions and failures of everything that a job gives."""
    seen: list[int] = []
    for chunk in Job(job_id, broker).iter_results():
        seen += chunk.positions.tolist()
    return tuple(seen)


def cancels(job_type: Callable[[str, Broker], Any] = Job) -> Body:
    return lambda broker, job_id: str(job_type(job_id, broker).cancel().state)


def retries(job_type: Callable[[str, Broker], Any] = Job) -> Body:
    return lambda broker, job_id: job_type(job_id, broker).retry_failed()


def reaps(reaper_type: Callable[[Broker], Any] = Reaper) -> Body:
    """What a reaper's round does for one job."""

    def body(broker: Broker, job_id: str) -> None:
        reaper, now_ms = reaper_type(broker), broker.connection.now_ms() + 1000
        if "until" in inspect.signature(reaper._look_after).parameters:  # looks at many jobs at once, for so long
            reaper._look_after([job_id], now_ms, math.inf)
        else:
            reaper._look_after(broker.jobs.status(job_id), now_ms)

    return body
