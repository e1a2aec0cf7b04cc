"""The shares of tenants and lanes with real workers: parts of the records in a time, and how long an urgent job takes.

    python -m benchmarks.ours.shares [--seconds 60] [--workers 4] [--kills] [--only NAME] [--json FILE]

A private Redis, and workers of the backend `dummy`, which sleeps a fixed time for each chunk: so the CPUs are not what
the shares depend on. Every chunk has 8 records of 32 words, the token budget of one batch, and 10 kB, so none counts
as a small chunk, of which more are on their way at once. Rates are counted over the given time, while every tenant and
lane that is compared has work waiting.

With --kills, a random worker is killed every 5 s and replaced, and Redis is killed every 20 s and comes back with what
it had stored, which may lack its last second. Then all jobs are run to their ends, and every record is counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ours.service import machine_line, service

from embedctl import Job, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.local import private_redis
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.settings import Settings
from embedctl_config.tenants import TenantEntry

#: Records of a chunk, and words of a record.
ROWS, WORDS = 8, 32
#: A worker's time for a chunk (seconds): short for shares, which need many chunks, and longer for times.
SHORT_S, LONG_S = 0.05, 0.25
#: A text without its number.
TEXT = " ".join(["w" * 40] * (WORDS - 1))
_WARM_S, _KILL_WORKER_S, _KILL_REDIS_S = 5.0, 5.0, 20.0
_INTERACTIVE_JOBS, _INTERACTIVE_RECORDS = 100, 8
_TENANTS, _LARGE = 1000, 200_000


@dataclass
class Loaded:
    """A Redis and its workers, which come back when they are killed. A worker takes `chunk_s` seconds for a chunk."""

    chunk_s: float
    settings: Settings
    folder: Path
    workers: int
    stack: ExitStack
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)

    def start_worker(self) -> None:
        with (self.folder / "workers.log").open("ab") as log:
            command = [sys.executable, "-m", "embedctl_workers", "--class", "dummy", "--model", "dummy"]
            variables = {**os.environ, "EMBEDCTL_REDIS_URL": self.settings.redis_url}
            self.processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))

    def start(self) -> None:
        """Start all workers, and wait until they are ready."""
        for _ in range(self.workers):
            self.start_worker()
        broker = Broker.connect(self.settings)
        while len(list(broker.workers.alive())) < self.workers:
            time.sleep(0.1)

    def kill_a_worker(self) -> None:
        doomed = random.choice(self.processes)
        doomed.kill()
        doomed.wait()
        self.processes.remove(doomed)
        self.killed["worker"] += 1
        self.start_worker()

    def kill_redis(self) -> None:
        with Broker.connect(self.settings).connection.client() as client:
            pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGKILL)
        self.stack.enter_context(private_redis(self.settings, self.folder))
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

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()


@contextmanager
def loaded(workers: int, chunk_s: float) -> Iterator[Loaded]:
    """A private Redis and workers for one measurement."""
    with service(dim=16, seconds_per_batch=chunk_s, token_budget=ROWS * WORDS) as of, ExitStack() as stack:
        made = Loaded(chunk_s, of.settings, of.folder, workers, stack)
        stack.callback(made.stop)
        made.start()
        yield made


def enqueue(of: Loaded, chunks: int, tenant: str, *, weight: float = 1.0, lane: str = "normal") -> Job:
    """A job of full chunks."""
    settings = of.settings.replace(tenants={tenant: TenantEntry(weight=weight)})
    texts = (f"{number} {TEXT}" for number in range(chunks * ROWS))
    # From an iterator, so that the job is not divided evenly among the workers.
    return enqueue_embeddings(texts, chunk_size=ROWS, tenant=tenant, lane=lane, settings=settings)


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
    """Chunks that keep the workers busy for longer than the measurement."""
    return math.ceil(1.3 * part * of.workers / of.chunk_s * (seconds + 2 * _WARM_S))


def fifty_to_one(of: Loaded, seconds: float, *, weight: float = 1.0, kills: bool = False) -> dict[str, Any]:
    """One tenant's 50 jobs and another's one job."""
    part = weight / (weight + 1)
    many = [enqueue(of, needed(of, seconds) // 50 + 1, "many") for _ in range(50)]
    one = [enqueue(of, needed(of, seconds, part), "one", weight=weight)]
    (of_many, of_one), took = progress(of, [many, one], seconds, kills=kills)
    figures: dict[str, Any] = {
        "share of one": of_one / (of_many + of_one),
        "records/s": (of_many + of_one) / took,
    }
    if kills:
        figures |= {"kills": dict(of.killed), **to_the_end([*many, *one])}
    return figures


def to_the_end(jobs: Sequence[Job]) -> dict[str, Any]:
    """Wait for all jobs, and count their records."""
    ended = [job.wait(timeout=600) for job in jobs]
    wrong = 0
    for job, status in zip(jobs, ended, strict=True):
        times = Counter(int(position) for chunk in job.iter_results() for position in chunk.positions)
        wrong += sum(times[position] != 1 for position in range(status.records)) + len(times) - status.records
    return {"jobs": dict(Counter(str(status.state) for status in ended)), "records lost or doubled": wrong}


def alone(of: Loaded, seconds: float) -> dict[str, Any]:
    """One tenant's 50 jobs, and nobody else's."""
    jobs = [enqueue(of, needed(of, seconds) // 50 + 1, "many") for _ in range(50)]
    (records,), took = progress(of, [jobs], seconds)
    return {"records/s": records / took}


def thousand(of: Loaded, seconds: float) -> dict[str, Any]:
    """A thousand tenants with one job each: Jain's index of their records. The first ones are alone at first."""
    each = math.ceil(needed(of, seconds) / _TENANTS) + 2
    of.stop()  # so that nobody is ahead when the last job is made
    jobs = [enqueue(of, each, f"tenant-{number}") for number in range(_TENANTS)]
    of.start()
    time.sleep(seconds)
    records = [job.status().done for job in jobs]
    assert sum(records) < 0.8 * each * ROWS * _TENANTS, "too few records"
    return {
        "Jain's index": sum(records) ** 2 / (len(records) * sum(each * each for each in records)),
        "least and most chunks": (min(records) / ROWS, max(records) / ROWS),
    }


def urgent(of: Loaded, seconds: float) -> dict[str, Any]:
    """Interactive jobs of one chunk, one after the other, beside a large job of another tenant."""
    large = enqueue(of, _LARGE // ROWS, "large")
    time.sleep(_WARM_S)
    times = []
    for _ in range(_INTERACTIVE_JOBS):
        began = time.monotonic()
        texts = [f"{number} {TEXT}" for number in range(_INTERACTIVE_RECORDS)]
        job = enqueue_embeddings(iter(texts), tenant="urgent", lane="interactive", settings=of.settings)
        job.wait(timeout=60)
        times.append((time.monotonic() - began) / of.chunk_s)
    large.cancel()
    times.sort()
    return {
        "chunk times, p50": statistics.median(times),
        "chunk times, p95": times[int(0.95 * len(times)) - 1],
        "bound": 3 + of.workers,
    }


def overload(of: Loaded, seconds: float) -> dict[str, Any]:
    """One tenant's normal job beside interactive jobs of ten tenants that never end."""
    urgent = [enqueue(of, needed(of, seconds) // 5, f"urgent-{n}", lane="interactive") for n in range(10)]
    normal = [enqueue(of, needed(of, seconds), "normal")]
    (of_urgent, of_normal), took = progress(of, [urgent, normal], seconds)
    return {"share of normal": of_normal / (of_urgent + of_normal), "records/s": (of_urgent + of_normal) / took}


MEASUREMENTS: dict[str, Callable[[Loaded, float], dict[str, Any]]] = {
    "50 jobs and 1 job, equal weights": fifty_to_one,
    "one tenant alone": alone,
    "50 jobs and 1 job, weights 1 and 3": lambda of, seconds: fifty_to_one(of, seconds, weight=3.0),
    "1,000 tenants": thousand,
    "urgent jobs beside 200,000 records": urgent,
    "normal under interactive overload": overload,
}
UNDER_KILLS = {
    "50 jobs and 1 job, equal weights, under kills": lambda of, seconds: fifty_to_one(of, seconds, kills=True),
    "50 jobs and 1 job, weights 1 and 3, under kills": lambda of, seconds: fifty_to_one(
        of, seconds, weight=3.0, kills=True
    ),
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", action="store_true", help="measure under kills")
    parser.add_argument("--only", default="", help="measurements whose names contain this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(machine_line(), flush=True)
    figures = {}
    for name, measure in (UNDER_KILLS if arguments.kills else MEASUREMENTS).items():
        if arguments.only in name:
            with loaded(arguments.workers, LONG_S if measure is urgent else SHORT_S) as of:
                figures[name] = measure(of, arguments.seconds)
            print(f"{name}: {_shown(figures[name])}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


def _shown(figures: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


if __name__ == "__main__":
    main()
