"""What the reaper costs while many jobs are active: how long its rounds take, and whether heartbeats continue.

    python benchmarks/ours/reaper_scale.py [--jobs 100000] [--beside 20000] [--delay-ms 1]

A proxy delays every byte to and from a private Redis. First, jobs of one chunk each are queued: half of them for a
class without workers, and half for a class whose worker never takes a ticket. Rounds of the reaper are timed: first
those that look at every job, then the usual ones with little to do. Then a real worker runs beside the jobs, and
the longest time between two of its heartbeats is measured by Redis' clock. Finally two real workers encode a job of
four chunks beside fewer queued jobs; each chunk takes longer than a lease.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from embedctl import enqueue_embeddings
from embedctl.broker import Broker
from embedctl.local import local_worker, private_redis
from embedctl.reaper import Reaper
from embedctl.store import ServedModel, WorkerRow
from embedctl.store.connection import ScriptCall
from embedctl.store.issuing import issue_call
from embedctl.store.status import COUNTS
from embedctl_config import keys, wire
from embedctl_config.cpu import cpu_name
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput

CONFIG = """
[classes.dummy]
backend = "dummy"
token_budget = 64
options = {dim = 16, seconds_per_batch = 0.5}
"""
#: Of the queued jobs: a class without a worker, and one whose worker takes no ticket.
IDLE, LONG = "idle", "long"
_TOGETHER = 500
_TTL_MS = 7 * 24 * 3600 * 1000


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--beside", type=int, default=20_000)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    parser.add_argument("--watch-s", type=float, default=90.0)
    parser.add_argument("--proxy", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.proxy:
        asyncio.run(_forward(arguments.proxy[0], float(arguments.proxy[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "embedctl.toml"
        config.write_text(CONFIG)
        os.environ["EMBEDCTL_CONFIG"] = str(config)  # for the workers
        for jobs, measure in ((arguments.jobs, _rounds_and_beats), (arguments.beside, _work_beside)):
            own = Path(folder) / measure.__name__
            own.mkdir()
            with _redis_at_a_distance(own, arguments.delay_ms) as (near, far):
                measure(near, far, own, jobs, arguments.watch_s)


@contextmanager
def _redis_at_a_distance(folder: Path, delay_ms: float) -> Iterator[tuple[Settings, Settings]]:
    """Settings that reach a Redis directly, and through the proxy."""
    entry = HardwareClass(backend="dummy", token_budget=64, options={"dim": 16, "seconds_per_batch": 0.5})
    plain = Settings(model="dummy", hardware="dummy", classes={"dummy": entry})
    with private_redis(plain, folder) as near:
        socket = near.redis_url.removeprefix("unix://").partition("?")[0]
        command = [sys.executable, __file__, "--proxy", socket, str(delay_ms)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
            assert proxy.stdout is not None
            far = near.replace(redis_url=f"redis://127.0.0.1:{int(proxy.stdout.readline())}/0")
            broker = Broker.connect(far)
            trips = [_timed(broker.connection.now_ms) for _ in range(50)]
            with near_client(near) as client:
                version = client.info("server")["redis_version"]
            print(
                f"{cpu_name()}, {os.cpu_count()} cores, Python "
                f"{platform.python_version()}, Redis {version}, a round trip {statistics.median(trips) * 1000:.1f} ms"
            )
            broker.close()
            try:
                yield near, far
            finally:
                proxy.terminate()


@contextmanager
def near_client(near: Settings) -> Iterator[Any]:
    """The bare client of a broker."""
    broker = Broker.connect(near)
    with broker.connection.client() as client:
        yield client
    broker.close()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _queue(near: Settings, hardware: str, count: int) -> None:
    """Make jobs of one chunk each, with their tickets, as producers do: many in one round trip."""
    broker = Broker.connect(near)
    payload = wire.encode_input(ChunkInput(0, bytes(1), [b"passage"]))
    queue, digest = keys.queue(hardware, "dummy"), wire.digest_of(payload)
    for at in range(0, count, _TOGETHER):
        now = broker.connection.now_ms()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now / 1000))
        ids = [f"{stamp}-{secrets.token_hex(5)}" for _ in range(min(_TOGETHER, count - at))]
        calls = []
        for job_id in ids:
            fields = _fields(hardware, now)
            shared = [keys.ACTIVE, keys.BIRTH, keys.JOBS, keys.UPKEEP]
            flat = [part for item in fields.items() for part in item]
            kept, look = int(_TTL_MS * keys.CHUNK_TTL_FACTOR), now + keys.LOOK_AFTER_S * 1000
            of_job, more = keys.of_job(job_id), (keys.chunk_input(job_id, 0), keys.chunk_result(job_id, 0))
            add = [job_id, 0, digest, 1, payload, "p", 1000, *wire.DIGEST_RANGE]
            calls += [
                ScriptCall(
                    "create",
                    [keys.job(job_id), *shared],
                    [job_id, now, _TTL_MS, kept, keys.job(""), look, *flat],
                ),
                ScriptCall("add", [*of_job, keys.producer(job_id), *more], add),
                ScriptCall("seal", [*of_job, keys.producer(job_id)], [job_id, 1]),
                issue_call(broker.settings, job_id, queue),
            ]
        answers = broker.connection.scripts(calls)
        assert all(isinstance(answer, tuple) for answer in answers), answers[:4]
        if hardware == LONG:  # no worker reads the tickets of the other class
            tickets = [broker.tickets.written(queue, job_id, [0]) for job_id in ids]
            broker.tickets.forward([ticket for each in tickets for ticket in each])
    broker.close()


def _fields(hardware: str, now: int) -> dict[str, object]:
    return {
        "version": wire.VERSION,
        "state": "submitting",
        "model": "dummy",
        "hardware": hardware,
        "precision": "fp32",
        "options": json.dumps({"prompt": None, "truncation": "truncate", "normalize": True, "chunk_size": 1}),
        "ttl_ms": _TTL_MS,
        "created_ms": now,
        "progressed_ms": now,
        "window": 8,
        **dict.fromkeys(COUNTS, 0),
        "next": 0,
    }


@contextmanager
def _a_worker_that_takes_nothing(near: Settings) -> Iterator[None]:
    """Heartbeats of a class, and no worker that sends them."""
    broker, stop = Broker.connect(near), threading.Event()
    served = {"dummy": ServedModel("aa" * 32, 16, 1.0)}
    row = WorkerRow("nobody", "nobody@host", 1, "host", LONG, "dummy", "fp32", "0", 1, served)

    def beat() -> None:
        while not stop.is_set():
            broker.workers.beat(row)
            stop.wait(5.0)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()
    broker.close()


def _rounds_and_beats(near: Settings, far: Settings, folder: Path, jobs: int, watch_s: float) -> None:
    with near_client(near) as client, ExitStack() as stack:
        began = time.monotonic()
        _queue(near, IDLE, jobs // 2)
        _queue(near, LONG, jobs - jobs // 2)
        print(f"{client.zcard(keys.ACTIVE)} active jobs queued in {time.monotonic() - began:.0f} s")
        stack.enter_context(_a_worker_that_takes_nothing(near))
        broker = Broker.connect(far)
        while broker.connection.uptime_s() < 2 * far.lease_s:
            time.sleep(1)
        _time_rounds(broker, client)
        broker.close()
        _watch_a_worker(near, far, folder, client, watch_s)


def _time_rounds(broker: Broker, client: Any) -> None:
    """Rounds one after the other, without the interval between them."""
    rounds: list[float] = []
    looked: list[int] = []
    while True:
        now_ms = broker.connection.now_ms()
        before = client.zcount(keys.UPKEEP, "-inf", now_ms)
        if rounds and before == 0:
            break
        client.delete(keys.REAPER)
        rounds.append(_timed(Reaper(broker).round))
        looked.append(before - client.zcount(keys.UPKEEP, "-inf", now_ms))
    busy = [(seconds, jobs) for seconds, jobs in zip(rounds, looked, strict=True) if jobs]
    total_s = sum(seconds for seconds, _ in busy)
    print(
        f"all due at once: {len(busy)} rounds, {sum(jobs for _, jobs in busy) / total_s:.0f} jobs/s, each "
        f"{statistics.median(seconds for seconds, _ in busy):.2f} s, the longest {max(rounds):.2f} s"
    )
    usual = []
    for _ in range(20):
        client.delete(keys.REAPER)
        usual.append(_timed(Reaper(broker).round))
    print(
        f"then 20 usual rounds, little of it due: {statistics.median(usual):.3f} s each, the longest {max(usual):.3f} s"
    )


def _watch_a_worker(near: Settings, far: Settings, folder: Path, client: Any, watch_s: float) -> None:
    with local_worker(far, hardware="dummy", model="dummy", cpus=None, log_file=folder / "worker.log"):
        broker = Broker.connect(near)
        (row,) = (each for each in broker.workers.alive() if each.hardware == "dummy")
        # All of it is due again, in the middle of the worker's life.
        ids = client.zrange(keys.UPKEEP, 0, -1)
        for at in range(0, len(ids), 5000):
            client.zadd(keys.UPKEEP, dict.fromkeys(ids[at : at + 5000], 1))
        due = client.zcount(keys.UPKEEP, "-inf", "(1000000000000")
        beats: set[float] = set()
        until = time.monotonic() + watch_s
        while time.monotonic() < until:
            beats.add(client.zscore(keys.WORKERS, row.instance))
            time.sleep(0.05)
        left = client.zcount(keys.UPKEEP, "-inf", "(1000000000000")
        told = sorted(beats)
        silences = [(after - before) / 1000 for before, after in pairwise(told)]
        print(
            f"a real worker, {due} jobs due, in {watch_s:.0f} s: {due - left} looked at; its heartbeats were "
            f"{statistics.median(silences):.2f} s apart, at most {max(silences):.2f} s"
        )
        broker.close()


def _work_beside(near: Settings, far: Settings, folder: Path, jobs: int, watch_s: float) -> None:
    _queue(near, IDLE, jobs)
    with near_client(near) as client, ExitStack() as stack:
        active = client.zcard(keys.ACTIVE)
        for number in range(2):
            log = folder / f"worker-{number}.log"
            stack.enter_context(local_worker(far, hardware="dummy", model="dummy", cpus=None, log_file=log))
        broker = Broker.connect(near)
        while broker.connection.uptime_s() < 2 * far.lease_s:
            time.sleep(1)
        began, least = time.monotonic(), 2
        job = enqueue_embeddings(_texts(), settings=far, hardware="dummy", chunk_size=40)
        while not job.status().state.ended:
            least = min(least, sum(each.hardware == "dummy" for each in broker.workers.alive()))
            time.sleep(0.5)
        status = job.status()
        print(
            f"two workers beside {active} queued jobs: a job of {status.chunks} chunks {status.state} in "
            f"{time.monotonic() - began:.0f} s, claims={status.claims} lapsed={status.lapsed} deaths={status.deaths} "
            f"refused={status.refused}, never fewer than {least} live workers"
        )
        broker.close()


def _texts() -> list[str]:
    return [f"passage {number} " + "word " * 60 for number in range(160)]


async def _forward(socket: str, delay_ms: float) -> None:
    """Delay every byte in both directions; prints the port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def pass_on() -> None:
            while True:
                at, data = await held.get()
                await asyncio.sleep(max(0.0, at - loop.time()))
                writer.write(data)
                await writer.drain()
                if not data:
                    return

        passing = asyncio.create_task(pass_on())
        with suppress(OSError):
            while data := await reader.read(256 * 1024):
                held.put_nowait((loop.time() + delay_ms / 1000, data))
        held.put_nowait((0.0, b""))
        with suppress(OSError):
            await passing
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(socket)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    main()
