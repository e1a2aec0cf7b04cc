"""Probes of the shares of tenants and lanes with real workers."""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.ours.service import Figures, Service, service

from embedctl import Job, enqueue_embeddings
from embedctl.operating.local import private_redis
from embedctl.queueing.broker import Broker
from embedctl_config import keys
from embedctl_config.errors import BrokerUnavailable

#: Records of a chunk, and words of a record.
ROWS, WORDS = 8, 32
#: How many times as long a long text is.
LONGER = 8
#: A worker's time for a chunk (seconds): short for shares, which need many chunks, and longer for times.
SHORT_S, LONG_S = 0.05, 0.25
#: A text without its number.
TEXT = " ".join(["w" * 40] * (WORDS - 1))
_WARM_S, _KILL_WORKER_S, _KILL_REDIS_S = 5.0, 5.0, 20.0
_INTERACTIVE_JOBS = 100
_TENANTS, _LARGE = 1000, 200_000


def shares(*, seconds: float = 60.0, workers: int = 4, only: str = "") -> Figures:
    """Tenants' and lanes' parts of the records in a time, and how long an urgent job takes beside a large one.

    Workers of the backend `dummy` sleep a fixed time for each chunk: so the CPUs are not what the shares depend on.
    Every chunk has 8 records of 32 words, the token budget of one batch, and 10 kB, so none counts as a small chunk, of
    which more are on their way at once. Rates are counted over the given time, while every tenant and lane that is
    compared has work waiting.
    """
    return _measured(
        {
            "50 jobs and 1 job, equal weights": fifty_to_one,
            "one tenant alone": alone,
            "50 jobs and 1 job, weights 1 and 3": partial(fifty_to_one, weight=3.0),
            "short and long texts, equal weights": short_and_long,
            "short and long texts, weights 1 and 3": partial(short_and_long, weight=3.0),
            "1,000 tenants": thousand,
            "urgent jobs beside 200,000 records": urgent,
            "normal under interactive overload": overload,
        },
        seconds,
        workers,
        only,
    )


def shares_under_kills(*, seconds: float = 60.0, workers: int = 4, only: str = "") -> Figures:
    """The shares of two tenants, while a worker is killed every 5 s and replaced, and Redis every 20 s.

    Redis comes back with what it had stored, which may lack its last second. Then all jobs are run to their ends, and
    every record is counted.
    """
    measures = {f"weights 1 and {weight:g}": partial(fifty_to_one, weight=weight, kills=True) for weight in (1.0, 3.0)}
    return _measured(measures, seconds, workers, only)


def _measured(
    measures: Mapping[str, Callable[[Loaded, float], Figures]], seconds: float, workers: int, only: str
) -> Figures:
    found: Figures = {}
    for name, measure in measures.items():
        if only in name:
            weights = {"one": measure.keywords["weight"]} if isinstance(measure, partial) else {}
            with loaded(workers, LONG_S if measure is urgent else SHORT_S, weights) as of:
                found |= {f"{name}: {what}": value for what, value in measure(of, seconds).items()}
    return found


@dataclass
class Loaded:
    """A Redis and its workers, which come back when they are killed. A worker takes `chunk_s` seconds for a chunk."""

    of: Service
    chunk_s: float
    workers: int
    stack: ExitStack
    killed: Counter[str] = field(default_factory=Counter)
    dead: list[int] = field(default_factory=list)

    def start(self, workers: int) -> None:
        """Start workers, and wait until they are ready."""
        for _ in range(workers):
            self.stack.enter_context(self.of.worker(f"worker-{self.killed.total()}"))

    def kill_a_worker(self) -> None:
        alive = [row.pid for row in Broker.connect(self.of.settings).workers.alive()]
        self.dead.append(random.choice([pid for pid in alive if pid not in self.dead]))
        os.kill(self.dead[-1], signal.SIGKILL)
        self.killed["worker"] += 1
        self.start(1)

    def kill_redis(self) -> None:
        with Broker.connect(self.of.settings).connection.client() as client:
            os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
        self.stack.enter_context(private_redis(self.of.settings, self.of.folder))
        self.killed["Redis"] += 1

    def run(self, seconds: float, *, kills: bool = False) -> None:
        """Let time pass. Kills are made here, not in a thread: a private Redis ends with the thread that started it."""
        began = time.monotonic()
        worker_at, redis_at = began + _KILL_WORKER_S, began + _KILL_REDIS_S
        while (now := time.monotonic()) < began + seconds:
            if kills and now >= worker_at:
                worker_at += _KILL_WORKER_S
                self.kill_a_worker()
            if kills and now >= redis_at:
                redis_at += _KILL_REDIS_S
                self.kill_redis()
            time.sleep(0.1)


@contextmanager
def loaded(workers: int, chunk_s: float, weights: Mapping[str, float]) -> Iterator[Loaded]:
    """A private Redis and workers for one measurement. The workers state these weights of tenants."""
    more: dict[str, Any] = (
        {"tenants": {name: {"weight": weight} for name, weight in weights.items()}} if weights else {}
    )
    with service(seconds_per_batch=chunk_s, token_budget=ROWS * WORDS, **more) as of, ExitStack() as stack:
        made = Loaded(of, chunk_s, workers, stack)
        made.start(workers)
        yield made


def enqueue(of: Loaded, chunks: int, tenant: str, *, lane: str = "normal", longer: int = 1) -> Job:
    """A job of full chunks, or of chunks that are so many times as long."""
    texts = (" ".join([str(number), *[TEXT] * longer]) for number in range(chunks * ROWS))
    # From an iterator, so that the job is not divided evenly among the workers.
    return enqueue_embeddings(texts, chunk_size=ROWS, tenant=tenant, lane=lane, settings=of.of.settings)


def done(jobs: Sequence[Job]) -> int:
    """Records done of some jobs."""
    while True:
        try:
            return sum(job.status().done for job in jobs)
        except BrokerUnavailable:
            time.sleep(0.1)


def progress(
    of: Loaded, groups: Sequence[Sequence[Job]], seconds: float, *, kills: bool = False
) -> tuple[list[int], float]:
    """The records done of each group of jobs in about this time, and the time."""
    of.run(_WARM_S)
    before, began = [done(jobs) for jobs in groups], time.monotonic()
    of.run(seconds, kills=kills)
    after, ended = [done(jobs) for jobs in groups], time.monotonic()
    left = [sum(job.status().records - job.status().done for job in jobs) for jobs in groups]
    assert all(left), f"too few records: {after} are done after {ended - began:.1f} s"
    return [now - then for now, then in zip(after, before, strict=True)], ended - began


def needed(of: Loaded, seconds: float, part: float = 1.0) -> int:
    """Chunks that keep the workers busy for longer than the measurement, and while the last jobs are submitted."""
    return math.ceil(3 * part * of.workers / of.chunk_s * (seconds + 2 * _WARM_S))


def fifty_to_one(of: Loaded, seconds: float, *, weight: float = 1.0, kills: bool = False) -> Figures:
    """One tenant's 50 jobs and another's one job."""
    part = weight / (weight + 1)
    many = [enqueue(of, needed(of, seconds) // 50 + 1, "many") for _ in range(50)]
    one = [enqueue(of, needed(of, seconds, part), "one")]
    (of_many, of_one), took = progress(of, [many, one], seconds, kills=kills)
    found = {"share of one": of_one / (of_many + of_one), "records/s": (of_many + of_one) / took}
    if not kills:
        return found
    killed: Figures = {f"kills, {what}": count for what, count in of.killed.items()}
    return {**found, **killed, "records lost or doubled": wrong([*many, *one])}


def short_and_long(of: Loaded, seconds: float, *, weight: float = 1.0) -> Figures:
    """One tenant's job of long texts and another's job of short ones: their parts of the work."""
    jobs = [enqueue(of, needed(of, seconds), "many"), enqueue(of, needed(of, seconds) // LONGER, "one", longer=LONGER)]
    of.run(_WARM_S)
    before = work_of(of, jobs)
    of.run(seconds)
    of_many, of_one = (now - then for now, then in zip(work_of(of, jobs), before, strict=True))
    assert not any(job.status().state.ended for job in jobs), "too few records"
    return {"share of long texts": of_one / (of_many + of_one), "work/s": (of_many + of_one) / seconds}


def work_of(of: Loaded, jobs: Sequence[Job]) -> list[int]:
    """What the workers did for each job: its tokens, each counted by its products."""
    with Broker.connect(of.of.settings).connection.client() as client:
        return [int(client.hget(keys.job(job.id), "work")) for job in jobs]


def wrong(jobs: Sequence[Job]) -> int:
    """Wait for all jobs, and count the records that are not there exactly once."""
    found = 0
    for job in jobs:
        records = job.wait(timeout=600).records
        times = Counter(int(position) for chunk in job.iter_results() for position in chunk.positions)
        found += sum(times[position] != 1 for position in range(records)) + len(times) - records
    return found


def alone(of: Loaded, seconds: float) -> Figures:
    """One tenant's 50 jobs, and nobody else's."""
    jobs = [enqueue(of, needed(of, seconds) // 50 + 1, "many") for _ in range(50)]
    (records,), took = progress(of, [jobs], seconds)
    return {"records/s": records / took}


def thousand(of: Loaded, seconds: float) -> Figures:
    """A thousand tenants with one job each: Jain's index of their records. The first ones are alone at first."""
    each = math.ceil(needed(of, seconds) / _TENANTS) + 2
    of.stack.close()  # the workers end, so that nobody is ahead when the last job is made
    jobs = [enqueue(of, each, f"tenant-{number}") for number in range(_TENANTS)]
    of.start(of.workers)
    time.sleep(seconds)
    records = [job.status().done for job in jobs]
    assert sum(records) < 0.8 * each * ROWS * _TENANTS, "too few records"
    return {
        "Jain's index": sum(records) ** 2 / (len(records) * sum(each * each for each in records)),
        "least chunks": min(records) / ROWS,
        "most chunks": max(records) / ROWS,
    }


def urgent(of: Loaded, seconds: float) -> Figures:
    """Interactive jobs of one chunk, one after the other, beside a large job of another tenant."""
    large = enqueue(of, _LARGE // ROWS, "large")
    time.sleep(_WARM_S)
    times = []
    for _ in range(_INTERACTIVE_JOBS):
        began = time.monotonic()
        texts = [f"{number} {TEXT}" for number in range(ROWS)]
        job = enqueue_embeddings(iter(texts), tenant="urgent", lane="interactive", settings=of.of.settings)
        job.wait(timeout=60)
        times.append((time.monotonic() - began) / of.chunk_s)
    large.cancel()
    return {
        "chunk times, p50": statistics.median(times),
        "chunk times, p95": sorted(times)[int(0.95 * len(times)) - 1],
        "bound": 3 + of.workers,
    }


def overload(of: Loaded, seconds: float) -> Figures:
    """One tenant's normal job beside interactive jobs of ten tenants that never end."""
    urgent = [enqueue(of, needed(of, seconds) // 5, f"urgent-{n}", lane="interactive") for n in range(10)]
    normal = [enqueue(of, needed(of, seconds), "normal")]
    (of_urgent, of_normal), took = progress(of, [urgent, normal], seconds)
    return {"share of normal": of_normal / (of_urgent + of_normal), "records/s": (of_urgent + of_normal) / took}
