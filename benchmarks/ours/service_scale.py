"""What a large service costs Redis: live workers, kept jobs and active jobs, and how long a look at them takes.

    python -m benchmarks.ours.service_scale [--workers 1000] [--kept 100000] [--active 1000] [--rate 100] [--json FILE]
    python -m benchmarks.ours.service_scale --reaper [--active 20000] [--delay-ms 1]

A private Redis, the real scripts and the real store, and nothing that encodes. One process sends the heartbeats of all
workers and runs their reapers, as worker processes do every five seconds. A second one takes tickets from the real
queue, claims and completes their chunks at the given rate, and submits a job for each one that ends. A third one
blocks on a queue, as every idle worker does. Meanwhile this process times the calls that people and programs make,
and reads Redis' own figures: INFO, and SLOWLOG for the time of each script.

All of it shares the machine's CPUs. Redis' share of a CPU and its times are its own; the times of calls also contain
the wait for a CPU.

With --reaper: what the reaper costs while many jobs are active. Half of the jobs are of a class without workers, and
half of a class whose worker never takes a ticket; a proxy delays every byte to and from Redis. Rounds of the reaper are
timed: first those that look at every job, then the usual ones with little to do. Then a real worker runs beside the
jobs, and the longest time between two of its heartbeats is measured by Redis' clock. Finally two real workers encode a
job of four chunks, each of which takes longer than a lease.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from benchmarks.ours.service import Service, machine_line, service
from tests.support.proxy import Proxy

from embedctl import enqueue_embeddings
from embedctl.broker import Broker
from embedctl.cli.json_forms import overview_json
from embedctl.doctor import examine
from embedctl.job import Job
from embedctl.overview import Gatherer
from embedctl.reaper import Reaper
from embedctl.routing import resolve, with_workers
from embedctl.store import Added, ClaimAnswer, Completed, JobSpec, ServedModel, WorkerRow
from embedctl.store.connection import script_source
from embedctl.store.queues import job_of
from embedctl.terminal.drawing import overview_lines
from embedctl_config import keys, wire
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput, ChunkResult

MODEL = HARDWARE = "dummy"
QUEUE = keys.queue(HARDWARE, MODEL)
OPTIONS = {"prompt": None, "truncation": "truncate", "normalize": True, "chunk_size": 2, "chunk_bytes": 1024}
FINGERPRINT, DIM, ROWS = "aa" * 32, 16, 2
#: Chunks of each active job.
CHUNKS = 10
#: Workers of one machine.
_PER_MACHINE = 8
_INTERVAL_S = 5.0
_TOGETHER = 1000
_SCRIPTS = ("create", "add", "hold", "seal", "issue", "claim", "complete", "renew", "reap", "audit", "settle")
#: Commands that no one sends while the service runs.
_OURS = {"config", "info", "slowlog", "copy"}
#: The size of Redis' own list of slow commands, and how long each command is in it (seconds).
_LISTED, _EACH_S = 60_000, 2.0
#: Of the reaper's jobs: a class without a worker, and one whose worker takes no ticket.
IDLE, LONG = "idle", "long"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--kept", type=int, default=100_000)
    parser.add_argument("--active", type=int, help="default: 1000; with --reaper 20000")
    parser.add_argument("--rate", type=float, default=100.0, help="chunks per second")
    parser.add_argument("--seconds", type=float, help="default: 30; with --reaper 90")
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--reaper", action="store_true", help="measure the reaper")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="of the reaper's way to Redis, in each direction")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.active = arguments.active or (20_000 if arguments.reaper else 1000)
    arguments.seconds = arguments.seconds or (90.0 if arguments.reaper else 30.0)
    if arguments.child:
        part, url, number = arguments.child
        _CHILDREN[part](load_settings(model=MODEL, hardware=HARDWARE, redis_url=url), float(number))
        return
    print(machine_line(), flush=True)
    if arguments.reaper:
        with service(dim=DIM, token_budget=64, seconds_per_batch=0.5) as of:
            reap(of, arguments)
        return
    with service(dim=DIM, token_budget=64) as of:
        figures = measure(of.settings, arguments)
    print_figures(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


def measure(settings: Settings, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fill a Redis, let the service run, and measure it; the figures, as JSON has them."""
    broker, trips = Broker.connect(settings), list[float]()
    looking = Broker.connect(settings, lambda name, seconds, answered: trips.append(seconds))
    with ExitStack() as stack, broker.connection.client() as client:
        stack.callback(broker.close)
        stack.callback(looking.close)
        began = time.monotonic()
        for _ in range(arguments.active):
            submit(broker)
        kept = keep(broker, arguments.kept)
        for part, number in (("beat", arguments.workers), ("work", arguments.rate), ("block", arguments.workers)):
            stack.enter_context(_child(part, settings.redis_url, number))
        _until(lambda: client.zcard(keys.WORKERS) >= arguments.workers)
        # No process reaps before that.
        _until(lambda: broker.connection.uptime_s() > 2 * settings.lease_s)
        filled_s = time.monotonic() - began
        redis = _service(client, arguments.seconds, lambda: _timed_calls(looking, trips, arguments.calls, kept))
        return {
            "load": os.getloadavg()[0],
            "versions": {
                "python": platform.python_version(),
                "redis": client.info("server")["redis_version"],
            },
            "workers": client.zcount(keys.WORKERS, broker.connection.now_ms(), "+inf"),
            "jobs": client.zcard(keys.JOBS),
            "active": client.zcard(keys.ACTIVE),
            "filled_s": filled_s,
            "used_memory": client.info("memory")["used_memory"],
            **redis,
            "per_command": _each_command(client),
        }


# Filling


def submit(broker: Broker, hardware: str = HARDWARE, chunks: int = CHUNKS) -> str:
    """Submit a job of small chunks, step by step as producers do."""
    spec = JobSpec(MODEL, hardware, "fp32", OPTIONS, 7 * 24 * 3600.0)
    job_id, _ = broker.jobs.create(spec)
    for chunk in range(chunks):
        data = _payload(chunk)
        answer, _ = broker.jobs.add(job_id, chunk, data, digest=wire.digest_of(data), rows=ROWS, token="p")  # noqa: S106
        assert answer is Added.OK
        if chunk == 0:
            broker.send_issued(broker.jobs.status(job_id))
    broker.jobs.seal(job_id, chunks)
    broker.send_issued(broker.jobs.status(job_id))
    return job_id


def _payload(chunk: int) -> bytes:
    texts = [f"text {chunk} {row}".encode() for row in range(ROWS)]
    return wire.encode_input(ChunkInput(chunk * ROWS, bytes(ROWS), texts))


def work(broker: Broker, job_id: str, chunk: int, instance: str) -> bool:
    """Claim and complete a chunk, as a worker does; returns whether its job has ended."""
    token = secrets.token_hex(8)
    claim = broker.jobs.claim(job_id, chunk, token=token, instance=instance, fingerprint=FINGERPRINT)
    if claim.answer is not ClaimAnswer.OK:
        return False
    given = wire.decode_input(claim.input)
    result = ChunkResult(
        first=chunk * ROWS,
        rows=ROWS,
        dim=DIM,
        digest=wire.digest_of(claim.input),
        fingerprint=job_fingerprint(FINGERPRINT, OPTIONS),
        precision="fp32",
        backend="dummy",
        vectors=bytes(ROWS * DIM * 4),
        checksums=given.row_checksums(),
    )
    report = Completed(done=ROWS, failed=0, truncated=0, tokens=8 * ROWS, dim=DIM)
    value = wire.encode_result(result)
    broker.jobs.complete(job_id, chunk, token, value, report, fingerprint=FINGERPRINT)
    status = broker.jobs.status(job_id)
    broker.send_issued(status)
    return status.state.ended


def keep(broker: Broker, count: int) -> str:
    """Store jobs that have ended, as copies of one; the id of the last one."""
    job_id = submit(broker)
    for chunk in range(CHUNKS):
        work(broker, job_id, chunk, "w")
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


# The service


def _beat(settings: Settings, workers: float) -> None:
    """The heartbeats and the reapers of all workers, one after the other, each every five seconds."""
    broker = Broker.connect(settings)
    rows = [_row(number) for number in range(int(workers))]
    reapers = [Reaper(broker) for _ in rows]
    began = time.monotonic()
    for turn in range(1 << 62):
        for number, (row, reaper) in enumerate(zip(rows, reapers, strict=True)):
            broker.workers.beat(row)
            broker.upkeep.agenda.wake(row.queues)
            reaper.round()
            if turn:  # at first, all of them at once
                _sleep_until(began + turn * _INTERVAL_S + number * _INTERVAL_S / len(rows))
        if not turn:
            began = time.monotonic() - _INTERVAL_S


def _row(number: int, hardware: str = HARDWARE) -> WorkerRow:
    served = ServedModel(FINGERPRINT, DIM, 1000.0, engine="an engine in words", rows_per_s=100.0)
    return WorkerRow(
        instance=f"{number:032x}",
        name=f"embedctl-{hardware}-{number % _PER_MACHINE}@host-{number // _PER_MACHINE}",
        pid=number,
        host=f"host-{number // _PER_MACHINE}",
        hardware=hardware,
        backend="dummy",
        precision="fp32",
        cpus="0-3",
        threads=4,
        models={MODEL: served, "another-dummy": served},
        machine=f"machine-{number // _PER_MACHINE}",
        process=f"{number} 1",
        device="cpu 0-3",
    )


def _work(settings: Settings, rate: float) -> None:
    """Take tickets, claim and complete their chunks, and submit a job for each one that ends."""
    broker = Broker.connect(settings)
    began, done = time.monotonic(), 0
    while True:
        with broker.connection.client() as client:
            _, ticket = client.brpop([QUEUE])
        job_id = job_of(ticket)
        assert job_id is not None
        chunk = int(json.loads(ticket)["headers"]["id"].split(".")[1])
        if work(broker, job_id, chunk, f"{done % 1000:032x}"):
            submit(broker)
        done += 1
        _sleep_until(began + done / rate)


def _block(settings: Settings, workers: float) -> None:
    """Block on queues that stay empty, as idle workers do through kombu: each asks again every second."""
    socket = settings.redis_url.removeprefix("unix://").partition("?")[0]

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_unix_connection(socket)
        await asyncio.sleep(number / max(1, int(workers)))
        name = f"embed.{HARDWARE}.empty".encode()
        command = b"*3\r\n$5\r\nBRPOP\r\n$%d\r\n%s\r\n$1\r\n1\r\n" % (len(name), name)
        while True:
            writer.write(command)
            await reader.readline()

    async def every() -> None:
        await asyncio.gather(*(one(number) for number in range(int(workers))))

    asyncio.run(every())


_CHILDREN: Mapping[str, Callable[[Settings, float], None]] = {"beat": _beat, "work": _work, "block": _block}


@contextmanager
def _child(part: str, url: str, number: float) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ours.service_scale", "--child", part, url, str(number)]
    ) as process:
        try:
            yield
            assert process.poll() is None, f"{part} has ended"
        finally:
            process.kill()


# Measuring


def _timed_calls(broker: Broker, trips: list[float], count: int, kept: str) -> dict[str, dict[str, float]]:
    """The times and the CPU times of each call in ms, its round trips, and the longest of them all.

    Args:
        trips: to it, the broker adds the duration of each of its round trips (seconds).
    """
    with broker.connection.client() as client:
        active = client.zrange(keys.ACTIVE, 0, 0)[0].decode()
    settings, seen = broker.settings, Gatherer(broker).look()

    def round_of_the_reaper() -> None:
        with broker.connection.client() as client:
            client.delete(keys.REAPER)
        Reaper(broker).round()

    def status_of(job_id: str) -> None:
        job = Job(job_id, broker)
        job.status(), job.workers(), job.gone_workers(), job.suspects()

    def fresh_look_at_offers() -> None:
        fresh = type(broker.workers)(broker.connection)
        resolve(settings, fresh, model=MODEL, hardware="auto", precision="fp32")

    calls: dict[str, Callable[[], object]] = {
        "a round of the reaper": round_of_the_reaper,
        "status of an active job": lambda: with_workers(
            type(broker.workers)(broker.connection), broker.jobs.status(active)
        ),
        "status of a kept job": lambda: broker.jobs.status(kept),
        "status JOB, with its workers": lambda: status_of(active),
        "status": lambda: Gatherer(broker).look(),
        "drawing it, 120 x 40": lambda: overview_lines(seen, 120, 40),
        "writing it as JSON": lambda: overview_json(seen),
        "list": lambda: list(islice(broker.jobs.newest(21), 20)),
        "submission's first look at offers": fresh_look_at_offers,
        "workers of this machine": lambda: list(broker.workers.here()),
        "resolve the end of an id": lambda: broker.jobs.resolve(kept[-8:]),
        "doctor": lambda: list(examine(settings)),
    }
    return {name: _times(call, count, trips) for name, call in calls.items()}


def _times(call: Callable[[], object], count: int, trips: list[float]) -> dict[str, float]:
    taken, computed = [], []
    trips.clear()
    for _ in range(count):
        began, cpu = time.perf_counter(), time.process_time()
        call()
        taken.append((time.perf_counter() - began) * 1000)
        computed.append((time.process_time() - cpu) * 1000)
    taken.sort()
    return {
        "cpu_p50_ms": statistics.median(computed),
        "cpu_min_ms": min(computed),
        "p50_ms": statistics.median(taken),
        "p99_ms": taken[int(0.99 * len(taken))],
        "max_ms": taken[-1],
        "trips": len(trips) / count,
        "longest_trip_ms": 1000 * max(trips, default=0.0),  # those of `doctor` are its own
    }


def _service(client: Any, seconds: float, look: Callable[[], Any]) -> dict[str, Any]:
    """Redis' figures over some seconds in which nobody looks, then the times of looks."""
    client.config_set("slowlog-log-slower-than", 500)
    client.config_set("slowlog-max-len", 1000)
    client.slowlog_reset()
    client.config_resetstat()
    before, began = client.info("cpu"), time.monotonic()
    done = _chunks_done(client)
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    after, stats = client.info("cpu"), client.info("commandstats")
    busy = sum(after[f"used_cpu_{kind}"] - before[f"used_cpu_{kind}"] for kind in ("user", "sys"))
    slowest_alone = _slowest(client)
    chunks = _chunks_done(client) - done
    commands = {
        name.removeprefix("cmdstat_"): {
            "calls_per_s": each["calls"] / elapsed,
            "us_per_call": each["usec_per_call"],
        }
        for name, each in stats.items()
        if name.removeprefix("cmdstat_") not in _OURS
    }
    client.slowlog_reset()
    calls = look()
    return {
        "seconds": elapsed,
        "chunks_per_s": chunks / elapsed,
        "commands_per_s": sum(each["calls_per_s"] for each in commands.values()),
        "cpu_share": busy / elapsed,
        "slowest": slowest_alone,
        "slowest_during_looks": _slowest(client),
        "commands": commands,
        "calls": calls,
    }


def _chunks_done(client: Any) -> int:
    stats = client.info("commandstats")
    return int(stats.get("cmdstat_renamenx", {}).get("calls", 0))  # one in each `complete`


def _slowest(client: Any) -> dict[str, Any]:
    found = [each for each in client.slowlog_get(1000) if _name(each).partition(" ")[0] not in _OURS]
    worst = max(found, key=lambda each: each["duration"], default=None)
    return {"ms": worst["duration"] / 1000, "command": _name(worst)} if worst else {"ms": 0.5, "command": "none"}


def _each_command(client: Any) -> dict[str, dict[str, float]]:
    """Each script and each command as its client sent it: calls per second, and µs for each."""
    client.config_set("slowlog-max-len", _LISTED)
    client.slowlog_reset()
    began = time.monotonic()
    client.config_set("slowlog-log-slower-than", 0)
    time.sleep(_EACH_S)
    client.config_set("slowlog-log-slower-than", -1)
    elapsed = time.monotonic() - began
    durations = defaultdict(list)
    for each in client.slowlog_get(_LISTED):
        durations[_name(each)].append(each["duration"])
    return {
        name: {
            "calls_per_s": len(taken) / elapsed,
            "us_per_call": statistics.fmean(taken),
            "max_us": max(taken),
        }
        for name, taken in sorted(durations.items(), key=lambda item: -sum(item[1]))
        if name.partition(" ")[0] not in _OURS
    }


_SHAS = {hashlib.sha1(script_source(name).encode()).hexdigest(): name for name in _SCRIPTS}  # noqa: S324


def _name(entry: Mapping[str, Any]) -> str:
    said: str = entry["command"].decode(errors="replace")
    command, *rest = said.split(" ")
    if command.lower() != "evalsha":
        return command.lower()
    return f"script {_SHAS.get(rest[0], 'of kombu')}"


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print the figures as people read them."""
    print(
        f"Redis {figures['versions']['redis']}\n{figures['workers']} workers, {figures['jobs']} jobs, "
        f"{figures['active']} of them active, {figures['chunks_per_s']:.0f} chunks/s\n"
        f"Redis: {figures['commands_per_s']:.0f} commands/s, "
        f"those of scripts included; {100 * figures['cpu_share']:.0f}% of a CPU; "
        f"{figures['used_memory'] / 2**20:.0f} MiB"
    )
    for when, name in (("", "slowest"), (" during looks", "slowest_during_looks")):
        print(f"the slowest command{when}: {figures[name]['command']}, {figures[name]['ms']:.1f} ms")
    print(f"\n{'call':36}{'p50 ms':>10}{'max ms':>10}{'CPU p50':>10}{'CPU min':>10}{'trips':>8}{'longest ms':>12}")
    for name, each in figures["calls"].items():
        times = (each[kind] for kind in ("p50_ms", "max_ms", "cpu_p50_ms", "cpu_min_ms"))
        print(
            f"{name:36}{''.join(f'{each:10.1f}' for each in times)}{each['trips']:8.1f}{each['longest_trip_ms']:12.1f}"
        )
    print(f"\n{'command, or in a script':36}{'calls/s':>10}{'µs':>10}{'max µs':>10}")
    for name, each in figures["per_command"].items():
        print(f"{name:36}{each['calls_per_s']:10.0f}{each['us_per_call']:10.1f}{each['max_us']:10.0f}")


# The reaper


def reap(of: Service, arguments: argparse.Namespace) -> None:
    """Queue jobs, and measure the reaper and workers beside them through a proxy."""
    proxy = Proxy(Path(of.settings.redis_url.removeprefix("unix://").partition("?")[0]))
    proxy.delay_s = arguments.delay_ms / 1000
    proxy.start()
    near, far = Broker.connect(of.settings), Broker.connect(of.settings.replace(redis_url=proxy.url))
    trips = [_seconds(far.connection.now_ms) for _ in range(50)]
    print(f"a round trip {1000 * statistics.median(trips):.1f} ms", flush=True)
    with near.connection.client() as client:
        for number in range(arguments.active):
            submit(near, LONG if number % 2 else IDLE, chunks=1)
        print(f"{client.zcard(keys.ACTIVE)} active jobs are queued", flush=True)
        with _a_worker_that_takes_nothing(near):
            _until(lambda: far.connection.uptime_s() >= 2 * far.settings.lease_s)
            _time_rounds(far, client)
            distant = Service(far.settings, of.folder)
            with distant.worker("worker-0"):
                _watch_a_worker(near, client, arguments.seconds)
            with distant.worker("worker-1"), distant.worker("worker-2"):
                _work_beside(far)
    far.close()
    near.close()
    proxy.stop()


@contextmanager
def _a_worker_that_takes_nothing(broker: Broker) -> Iterator[None]:
    """Heartbeats of a class, and no worker that sends them."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.is_set():
            broker.workers.beat(_row(0, LONG))
            stop.wait(_INTERVAL_S)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def _time_rounds(broker: Broker, client: Any) -> None:
    """Rounds one after the other, without the interval between them."""

    def round_s() -> float:
        client.delete(keys.REAPER)
        return _seconds(Reaper(broker).round)

    agenda = keys.UPKEEP
    client.zadd(agenda, dict.fromkeys(client.zrange(agenda, 0, -1), 1))  # all of it is due
    rounds, looked = [], []
    while before := client.zcount(agenda, "-inf", now_ms := broker.connection.now_ms()):
        rounds.append(round_s())
        looked.append(before - client.zcount(agenda, "-inf", now_ms))
    print(
        f"all due at once: {len(rounds)} rounds, {sum(looked) / sum(rounds):.0f} jobs/s, each "
        f"{statistics.median(rounds):.2f} s, the longest {max(rounds):.2f} s"
    )
    usual = [round_s() for _ in range(20)]
    print(f"then 20 usual rounds, little of it due: {statistics.median(usual):.3f} s, the longest {max(usual):.3f} s")


def _watch_a_worker(broker: Broker, client: Any, seconds: float) -> None:
    """The time between the heartbeats of a real worker, while all jobs are due again."""
    (row,) = (each for each in broker.workers.alive() if each.hardware == HARDWARE)
    agenda = keys.UPKEEP
    client.zadd(agenda, dict.fromkeys(client.zrange(agenda, 0, -1), 1))
    due = client.zcount(agenda, 1, 1)
    beats: set[float] = set()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        beats.add(client.zscore(keys.WORKERS, row.instance))
        time.sleep(0.05)
    silences = [(after - before) / 1000 for before, after in pairwise(sorted(beats))]
    print(
        f"a real worker, {due} jobs due, in {seconds:.0f} s: {due - client.zcount(agenda, 1, 1)} looked at; its "
        f"heartbeats were {statistics.median(silences):.2f} s apart, at most {max(silences):.2f} s"
    )


def _work_beside(broker: Broker) -> None:
    """A job of four chunks for two real workers."""
    texts = [f"passage {number} " + "word " * 60 for number in range(160)]
    began, least = time.monotonic(), 2
    job = enqueue_embeddings(texts, settings=broker.settings, hardware=HARDWARE, chunk_size=40)
    while not (status := job.status()).state.ended:
        least = min(least, sum(each.hardware == HARDWARE for each in broker.workers.alive()))
        time.sleep(0.5)
    print(
        f"two workers: a job of {status.chunks} chunks {status.state} in {time.monotonic() - began:.0f} s, "
        f"claims={status.claims} lapsed={status.lapsed} deaths={status.deaths} refused={status.refused}, never fewer "
        f"than {least} live workers"
    )


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline, "a part of the service does not run"
        time.sleep(0.1)


def _sleep_until(moment: float) -> None:
    with suppress(ValueError):  # it is later
        time.sleep(moment - time.monotonic())


if __name__ == "__main__":
    main()
