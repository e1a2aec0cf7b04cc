"""The probe of the reaper: what it costs while many jobs are active."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ours.service import DUMMY, Figures, Service, seconds_of, service
from benchmarks.ours.service_scale import DIM, INTERVAL_S, row_of, submit
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

from embedctl import enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl_config import keys

#: Of the jobs: a class without a worker, and one whose worker takes no chunk.
IDLE, LONG = "idle", "long"


def reaper(*, active: int = 20_000, delay_ms: float = 1.0, seconds: float = 90.0) -> Figures:
    """What the reaper costs while many jobs are active, through a proxy that delays every byte in each direction.

    Half of the jobs are of a class without workers, and half of a class whose worker never takes a chunk. Rounds of
    the reaper are timed: first those that look at every job, then the usual ones with little to do. Then a real worker
    runs beside the jobs, all of them due again, and the time between its heartbeats is measured by Redis' clock.
    Finally two real workers encode a job of four chunks, each of which takes longer than a lease.
    """
    with service(dim=DIM, token_budget=64, seconds_per_batch=0.5) as of, ExitStack() as stack:
        proxy = Proxy(Path(of.settings.redis_url.removeprefix("unix://").partition("?")[0]), delay_s=delay_ms / 1000)
        proxy.start()
        stack.callback(proxy.stop)
        near, far = Broker.connect(of.settings), Broker.connect(of.settings.replace(redis_url=proxy.url))
        client, distant = stack.enter_context(near.connection.client()), Service(far.settings, of.folder)
        for number in range(active):
            submit(near, LONG if number % 2 else IDLE, chunks=1)
        stack.enter_context(_a_worker_that_takes_nothing(near))
        eventually(lambda: far.connection.uptime_s() >= 2 * far.settings.lease_s)
        found = {"a round trip, ms": 1000 * median(seconds_of(far.connection.now_ms) for _ in range(50))}
        found |= _rounds(far, client)
        with distant.worker("worker-0"):
            found |= _heartbeats(near, client, seconds)
        with distant.worker("worker-1"), distant.worker("worker-2"):
            return found | _job_of_two_workers(far)


@contextmanager
def _a_worker_that_takes_nothing(broker: Broker) -> Iterator[None]:
    """Heartbeats of a class, and no worker that sends them."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(INTERVAL_S):
            broker.workers.beat(row_of(0, LONG))

    broker.workers.beat(row_of(0, LONG))
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def _make_all_due(client: Any) -> int:
    """The number of jobs that the reaper has to look at then."""
    client.zadd(keys.UPKEEP, dict.fromkeys(client.zrange(keys.UPKEEP, 0, -1), 1))
    return int(client.zcount(keys.UPKEEP, 1, 1))


def _rounds(broker: Broker, client: Any) -> Figures:
    """Rounds one after the other, without the interval between them."""

    def round_s() -> float:
        client.delete(keys.REAPER)
        return seconds_of(Reaper(broker).round)

    _make_all_due(client)
    rounds, looked = [], 0
    while before := client.zcount(keys.UPKEEP, "-inf", now_ms := broker.connection.now_ms()):
        rounds.append(round_s())
        looked += before - client.zcount(keys.UPKEEP, "-inf", now_ms)
    usual = [round_s() for _ in range(20)]
    return {
        "all due at once: jobs/s": looked / sum(rounds),
        "all due at once: a round, s": median(rounds),
        "all due at once: the longest round, s": max(rounds),
        "a usual round, s": median(usual),
        "the longest usual round, s": max(usual),
    }


def _heartbeats(broker: Broker, client: Any, seconds: float) -> Figures:
    """The time between the heartbeats of a real worker, while all jobs are due again."""
    (row,) = (each for each in broker.workers.alive() if each.hardware == DUMMY)
    due = _make_all_due(client)
    beats: set[float] = set()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        beats.add(client.zscore(keys.WORKERS, row.instance))
        time.sleep(0.05)
    silences = [(after - before) / 1000 for before, after in pairwise(sorted(beats))]
    return {
        "beside a worker: jobs looked at": due - int(client.zcount(keys.UPKEEP, 1, 1)),
        "its heartbeats: s apart": median(silences),
        "its heartbeats: s apart at most": max(silences),
    }


def _job_of_two_workers(broker: Broker) -> Figures:
    """A job of four chunks."""
    texts = [f"passage {number} " + "word " * 60 for number in range(160)]
    began = time.monotonic()
    status = enqueue_embeddings(texts, settings=broker.settings, hardware=DUMMY, chunk_size=40).wait()
    assert status.done == len(texts)
    return {
        "a job of two workers: s": time.monotonic() - began,
        "its claims": status.claims,
        "its lapsed leases": status.lapsed,
        "its deaths": status.deaths,
    }
