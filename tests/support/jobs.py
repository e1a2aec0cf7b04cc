"""Jobs in tests: their expected vectors, and their data in Redis."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import redis as redis_py

from embedctl import Job
from embedctl.broker import Broker
from embedctl_config import keys
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.store import active_jobs


def reference(texts: Sequence[str], prompt: str | None = None, seed: int = 0) -> Vectors:
    """The unit vectors of the dummy backend: float32, (texts, 16)."""
    backend = DummyBackend(dim=16, seed=seed)
    return backend.finish(backend.forward(backend.tokenize(texts, prompt), np.arange(len(texts))), normalize=True)


def active_job_id(broker: Broker) -> str:
    """The id of the one job that is under way."""
    (job_id,) = active_jobs(broker)
    return job_id


def last_event(broker: Broker, job_id: str, after: str, timeout_s: float) -> str:
    """Wait until something happens to a job, or the time is over. The id of its last event, or `after`."""
    events = broker.jobs.events(job_id, after, timeout_s)
    return events[-1].id if events else after


def owners(raw: redis_py.Redis, job: Job) -> dict[int, list[str]]:
    """Leased chunk → token, worker and, in careful mode, the worker's current row."""
    held = cast(Mapping[bytes, bytes], raw.hgetall(keys.owners(job.id)))  # this client decodes nothing
    return {int(chunk): owner.decode().split(" ") for chunk, owner in held.items()}


def nobody_reads_jobs(raw: redis_py.Redis) -> bool:
    """Whether nobody waits for a job any more: whoever waits looks at it each second."""
    before = job_reads(raw)
    time.sleep(1.5)  # a busy machine may hide one that waits
    return job_reads(raw) == before


def job_reads(raw: redis_py.Redis) -> int:
    """How often clients have read a job's hash."""
    return int(raw.info("commandstats")["cmdstat_hgetall"]["calls"])
