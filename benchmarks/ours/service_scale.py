"""The probe of a large service: what live workers, kept jobs and active jobs cost Redis, and a look at them."""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import Any

from benchmarks.ours.service import DUMMY, SCRIPTS, Figures, seconds_of, service, slow_log
from tests.support.store import MINE, encoded, new_job, row, take
from tests.support.waiting import eventually

from embedctl.jobs.job import Job
from embedctl.operating.doctor import examine
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.queueing.routing import resolve, with_workers
from embedctl.store import WorkerRow
from embedctl.waiting.overview import Gatherer
from embedctl_config import keys
from embedctl_config.settings import Settings

#: Chunks of each active job, and dimensions of its vectors.
CHUNKS, DIM = 10, 16
#: Workers of one machine, and the time between two of a worker's heartbeats (seconds).
_PER_MACHINE, _INTERVAL_S = 8, 5.0
_TOGETHER = 1000
#: Commands that no one sends while the service runs.
_OURS = {"config", "info", "slowlog", "copy"}
#: How long everything is looked at, whatever it takes (seconds); else what takes longer (µs).
_EACH_S, _SLOW_US = 2.0, 500


def service_scale(
    *,
    workers: int = 1000,
    kept: int = 100_000,
    active: int = 1000,
    rate: float = 100.0,
    seconds: float = 30.0,
    calls: int = 30,
) -> Figures:
    """What a large service costs Redis: workers, kept jobs and active jobs; and how long a look at them takes.

    A private Redis, the real scripts and the real store, and nothing that encodes. One process sends the heartbeats of
    all workers and runs their reapers, as worker processes do every five seconds. A second one claims
    and completes chunks at the given rate, and submits a job for each one that ends. A third
    one blocks on a queue, as every idle worker does. Redis' own figures are read over some seconds in which nobody
    looks; then the calls that people and programs make are timed.

    Redis' share of a CPU and its times are its own; the times of calls also contain the wait for a CPU.
    """
    with service(dim=DIM, token_budget=64) as of, ExitStack() as stack:
        broker, trips = Broker.connect(of.settings), list[float]()
        looking = Broker.connect(of.settings, lambda name, taken, answered: trips.append(taken))
        client = stack.enter_context(broker.connection.client())
        last = keep(broker, kept)
        for _ in range(active):
            submit(broker)
        for part, number in ((_beat, workers), (_work, rate), (_block, workers)):
            stack.enter_context(_process(part, of.settings, number))
        eventually(lambda: client.zcard(keys.WORKERS) >= workers)
        # No process reaps before that.
        eventually(lambda: broker.connection.uptime_s() > 2 * of.settings.lease_s)
        with slow_log(broker, _SLOW_US) as alone:
            found = _alone(client, seconds)
        with slow_log(broker, _SLOW_US) as meanwhile:
            found |= _timed_calls(looking, trips, calls, last)
        with slow_log(broker, 0) as each:
            time.sleep(_EACH_S)
        return {
            "workers": client.zcount(keys.WORKERS, broker.connection.now_ms(), "+inf"),
            "jobs": client.zcard(keys.JOBS),
            "active jobs": client.zcard(keys.ACTIVE),
            "MiB": client.info("memory")["used_memory"] / 2**20,
            **found,
            "slowest command, ms": _slowest_ms(alone),
            "slowest command during looks, ms": _slowest_ms(meanwhile),
            **{f"script {name}: mean ms": statistics.fmean(each[name]) / 1000 for name in SCRIPTS if name in each},
        }


def submit(broker: Broker) -> str:
    """Submit a job of small chunks, in the steps of a producer."""
    return new_job(broker, CHUNKS, hardware=DUMMY, ttl_s=7 * 24 * 3600.0)


def work(broker: Broker, instance: str) -> bool:
    """Claim and complete a chunk, as a worker does; returns whether its job has ended."""
    claimed = take(broker, secrets.token_hex(8), instance=instance, queue=keys.queue(DUMMY, DUMMY))
    if claimed is None:
        return False
    value, report = encoded(claimed.input, dim=DIM)
    broker.jobs.complete(claimed.job_id, claimed.chunk, claimed.token, value, report, fingerprint=MINE)
    return broker.jobs.status(claimed.job_id).state.ended


def keep(broker: Broker, count: int) -> str:
    """Store jobs that have ended, as copies of one; the id of the last one."""
    job_id = submit(broker)
    while not work(broker, "w"):
        pass
    assert broker.jobs.status(job_id).state.ended
    now = broker.connection.now_ms()
    with broker.connection.client() as client:
        for at in range(0, count, _TOGETHER):
            pipe = client.pipeline(transaction=False)
            names = {}
            for number in range(at, min(at + _TOGETHER, count)):
                made_ms = now - 1000 - number * 1000
                stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(made_ms / 1000))
                name = f"{stamp}-{secrets.token_hex(5)}"
                names[name] = made_ms
                pipe.copy(keys.job(job_id), keys.job(name))
                pipe.hset(keys.job(name), mapping={"created_ms": made_ms, "started_ms": made_ms, "ended_ms": made_ms})
            pipe.zadd(keys.JOBS, names)
            pipe.execute()
    return job_id


@contextmanager
def _process(part: Callable[[Settings, float], None], settings: Settings, number: float) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=part, args=(settings, number), daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive(), f"{part.__name__} has ended"
    finally:
        process.kill()


def _beat(settings: Settings, workers: float) -> None:
    """The heartbeats and the reapers of all workers, one after the other, each every five seconds. They ring twice as
    often."""
    broker, interval_s = Broker.connect(settings), _INTERVAL_S / 2
    rows = [_row(number) for number in range(int(workers))]
    reapers = [Reaper(broker) for _ in rows]
    began = time.monotonic()
    for turn in range(1 << 62):
        for number, (each, reaper) in enumerate(zip(rows, reapers, strict=True)):
            if turn % 2 == 0:
                broker.workers.beat(each)
                reaper.round()
            broker.jobs.ring("fp32", dict.fromkeys(each.queues, MINE))
            if turn:  # at first, all of them at once
                _sleep_until(began + turn * interval_s + number * interval_s / len(rows))
        if not turn:
            began = time.monotonic() - interval_s


def _row(number: int) -> WorkerRow:
    """What a worker's heartbeat says."""
    host = number // _PER_MACHINE
    return row(
        f"{number:032x}",
        *(DUMMY, "another-dummy"),
        hardware=DUMMY,
        name=f"embedctl-{DUMMY}-{number % _PER_MACHINE}@host-{host}",
        pid=number,
        host=f"host-{host}",
        machine=f"machine-{host}",
        process=f"{number} 1",
        device="cpu 0-3",
    )


def _work(settings: Settings, rate: float) -> None:
    """At each bell, claim and complete a chunk; submit a job for each one that ends."""
    broker = Broker.connect(settings)
    began, done = time.monotonic(), 0
    while True:
        with broker.connection.client() as client:
            client.brpop([keys.queue(DUMMY, DUMMY)])
        if work(broker, f"{done % 1000:032x}"):
            submit(broker)
        done += 1
        _sleep_until(began + done / rate)


def _block(settings: Settings, workers: float) -> None:
    """Block on queues that stay empty, as idle workers do through kombu: each asks again every second."""
    socket = settings.redis_url.removeprefix("unix://").partition("?")[0]

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_unix_connection(socket)
        await asyncio.sleep(number / max(1, int(workers)))
        name = f"embed.{DUMMY}.empty".encode()
        command = b"*3\r\n$5\r\nBRPOP\r\n$%d\r\n%s\r\n$1\r\n1\r\n" % (len(name), name)
        while True:
            writer.write(command)
            await reader.readline()

    async def every() -> None:
        await asyncio.gather(*(one(number) for number in range(int(workers))))

    asyncio.run(every())


def _timed_calls(broker: Broker, trips: list[float], count: int, kept: str) -> Figures:
    """The times of each call, and the longest of its round trips, whose durations the broker adds to `trips` (s)."""
    with broker.connection.client() as client:
        active = client.zrange(keys.ACTIVE, 0, 0)[0].decode()
    settings, workers = broker.settings, type(broker.workers)

    def round_of_the_reaper() -> None:
        with broker.connection.client() as client:
            client.delete(keys.REAPER)
        Reaper(broker).round()

    def status_of(job_id: str) -> None:
        job = Job(job_id, broker)
        job.status(), job.workers(), job.gone_workers(), job.suspects()

    def fresh_look_at_offers() -> None:
        resolve(settings, workers(broker.connection), model=DUMMY, hardware="auto", precision="fp32")

    calls: dict[str, Callable[[], object]] = {
        "a round of the reaper": round_of_the_reaper,
        "status of an active job": lambda: with_workers(workers(broker.connection), broker.jobs.status(active)),
        "status JOB, with its workers": lambda: status_of(active),
        "status": lambda: Gatherer(broker).look(),
        "list": lambda: list(islice(broker.jobs.newest(21), 20)),
        "submission's first look at offers": fresh_look_at_offers,
        "workers of this machine": lambda: list(broker.workers.here()),
        "resolve the end of an id": lambda: broker.jobs.resolve(kept[-8:]),
        "doctor": lambda: list(examine(settings)),
    }
    found: Figures = {}
    for name, call in calls.items():
        trips.clear()
        taken = [1000 * seconds_of(call) for _ in range(count)]
        found |= {f"{name}: p50 ms": statistics.median(taken), f"{name}: longest ms": max(taken)}
        if trips:  # those of `doctor` are its own
            found[f"{name}: longest round trip, ms"] = 1000 * max(trips)
    return found


def _alone(client: Any, seconds: float) -> Figures:
    """Redis' figures over some seconds in which nobody looks."""
    client.config_resetstat()
    before, began = client.info("cpu"), time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    after, stats = client.info("cpu"), client.info("commandstats")
    busy = sum(after[f"used_cpu_{kind}"] - before[f"used_cpu_{kind}"] for kind in ("user", "sys"))
    calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
    return {
        "chunks/s": calls.get("renamenx", 0) / elapsed,  # one in each `complete`
        "commands/s, those of scripts included": sum(n for name, n in calls.items() if name not in _OURS) / elapsed,
        "share of a CPU": busy / elapsed,
    }


def _slowest_ms(durations: Mapping[str, Sequence[float]]) -> float:
    """Of the commands that took more than half a millisecond."""
    return max([_SLOW_US, *(max(each) for name, each in durations.items() if name not in _OURS)]) / 1000


def _sleep_until(moment: float) -> None:
    with suppress(ValueError):  # it is later
        time.sleep(moment - time.monotonic())
