"""Probes of jobs: what they cost Redis, and how fast they are queued, encoded, recovered and drained."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import cast

import numpy as np
from benchmarks.ours.service import DUMMY, Figures, seconds_of, service

from embedctl import Job, enqueue_embeddings
from embedctl.corpus.reading import open_corpus
from embedctl.corpus.rows import Rows
from embedctl.jobs.enqueue import submit
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl_bench.texts.words import draw_words
from embedctl_config import keys

_MODEL = "all-MiniLM-L6-v2"
_IDLE_S = 12.0


def redis_calls(*, chunks: int = 1000, rows: int = 16) -> Figures:
    """The cost of a chunk for Redis when nothing fails: commands, those of scripts included, and bytes.

    The producer looks once a second. What an idle stack costs in the same time is subtracted. With
    EMBEDCTL_CHUNK_FILES, the bytes of chunks are outside of Redis.
    """
    with service(workers=1, dim=384) as of, Broker.connect(of.settings).connection.client() as client:
        settings = of.settings.replace(chunk_files=os.environ.get("EMBEDCTL_CHUNK_FILES", ""))

        def counts() -> Figures:
            commands, stats = client.info("commandstats"), client.info("stats")
            found = {name.removeprefix("cmdstat_"): float(facts["calls"]) for name, facts in commands.items()}
            return found | {"bytes in": stats["total_net_input_bytes"], "bytes out": stats["total_net_output_bytes"]}

        texts = [f"passage {number} " + "word " * 40 for number in range(chunks * rows)]
        enqueue_embeddings(texts[:rows], settings=settings, chunk_size=rows).wait()
        before = counts()
        time.sleep(_IDLE_S)
        idle, started = counts(), time.monotonic()
        job = enqueue_embeddings(texts, settings=settings, chunk_size=rows)
        while not job.status().state.ended:
            time.sleep(1.0)
        share = (time.monotonic() - started) / _IDLE_S
        after = counts()
        assert job.status().done == len(texts)
        spent = {
            name: (count - idle.get(name, 0) - share * (idle.get(name, 0) - before.get(name, 0))) / chunks
            for name, count in sorted(after.items())
        }
        return {f"{name} a chunk": each for name, each in spent.items() if each >= 0.05}


def recovery(*, kills: int = 5, alone: bool = False) -> Figures:
    """Seconds from SIGKILL of a worker to the next claim of its chunk, with a second worker idle.

    With alone, the neighbour can't see the death, as if it were on another machine.
    """
    texts = [f"passage {number} " + "word " * 200 for number in range(400)]
    waited = []
    with service(seconds_per_batch=1.0, token_budget=256) as of, ExitStack() as stack:
        broker = Broker.connect(of.settings)
        client = stack.enter_context(broker.connection.client())

        def owner(job: Job) -> str:
            """The worker that owns the job's first chunk, or an empty string."""
            found = client.hget(keys.owners(job.id), 0)
            return found.decode().split(" ")[1] if found else ""

        def recovered(job: Job) -> float:
            """Kill the owner; the seconds until the chunk has another one."""
            while not (first := owner(job)):
                time.sleep(0.01)
            time.sleep(random.uniform(0, 10))  # two heartbeats
            doomed = next(row for row in broker.workers.alive() if row.instance == first)
            if alone:
                client.unlink(keys.machine(doomed.machine))
            os.kill(doomed.pid, signal.SIGKILL)
            killed = time.monotonic()
            while owner(job) in (first, ""):
                time.sleep(0.01)
            return time.monotonic() - killed

        while broker.connection.uptime_s() < 2 * of.settings.lease_s:  # no reaper acts so soon after Redis started
            time.sleep(1)
        for trial in range(kills):
            with of.worker(f"{trial}-0"), of.worker(f"{trial}-1"):
                job = enqueue_embeddings(iter(texts), settings=of.settings)  # a list would be divided among both
                waited.append(recovered(job))
                job.cancel()
    return {"p50 s": statistics.median(waited), "p95 s": float(np.percentile(waited, 95)), "most s": max(waited)}


def submit_rate(*, records: int = 200_000) -> Figures:
    """How fast a corpus is queued with no worker running, against a bare parse loop of the same file."""
    draw = random.Random(0)
    with service() as of:
        path = of.folder / "corpus.jsonl"
        with path.open("w") as stream:
            for number in range(records):
                stream.write(json.dumps({"id": number, "text": draw_words(draw, 20)[: draw.randint(50, 100)]}) + "\n")

        def parse() -> None:
            with path.open("rb") as stream:
                for line in stream:
                    json.loads(line)

        def queue() -> None:
            broker = Broker.connect(of.settings)
            corpus = open_corpus(str(path), rows=Rows(of.settings.max_text_bytes))
            corpus.check()  # as the command line does
            submit(broker, corpus.records(), SubmitOptions(model="none", hardware="cpu"))
            broker.close()

        parse_s, queue_s = seconds_of(parse), seconds_of(queue)
    return {"records/s": records / queue_s, "share of the parse loop's rate": parse_s / queue_s}


def submit_latency(*, calls: int = 40) -> Figures:
    """How long one text takes to be queued, warm, with no worker running."""
    with service() as of:

        def queue() -> None:
            enqueue_embeddings(["The weather was fine until noon."], settings=of.settings, hardware="cpu")

        taken = [1000 * seconds_of(queue) for _ in range(10 + calls)][10:]
    return {"p50 ms": statistics.median(taken), "p90 ms": float(np.percentile(taken, 90))}


def small_jobs(*, jobs: int = 256, singles: int = 100, model: str = _MODEL, hardware: str = "cpu") -> Figures:
    """Many small jobs against one job with the same texts, and one text from its submission to its vector.

    A caller submits a job, waits for its vectors, and goes on with its next job.
    """
    draw = random.Random(7)
    mixed = [draw.randint(1, 8) for _ in range(jobs)]
    loads = {"64 callers of 4": (64, [4] * jobs), "100 callers of 1 to 8": (100, mixed)}
    with service() as of, of.worker(hardware=hardware, model=model):

        def texts(count: int) -> list[str]:
            return [draw_words(draw, draw.randint(10, 30)) for _ in range(count)]

        def run(given: list[str]) -> None:
            job = enqueue_embeddings(given, model=model, hardware=hardware, settings=of.settings)
            job.wait()
            assert len(job.vectors()) == len(given)

        def encode(given: list[str]) -> float:
            return seconds_of(lambda: run(given))

        for _ in range(10):
            encode(texts(8))
        alone = [1000 * encode(texts(1)) for _ in range(singles)]
        found = {"one text, p50 ms": statistics.median(alone), "one text, p99 ms": float(np.percentile(alone, 99))}
        for name, (callers, sizes) in loads.items():
            many = [texts(size) for size in sizes]
            together = [text for job in many for text in job]
            with ThreadPoolExecutor(callers) as pool:
                began = time.perf_counter()
                list(pool.map(encode, many))
                many_s = time.perf_counter() - began
            found[f"{name}: texts/s"] = len(together) / many_s
            found[f"{name}: rate, of one job's"] = encode(together) / many_s
    return found


def drain(*, records: int = 2_000_000, dim: int = 384, maxmemory: str = "128mb", workers: int = 1) -> Figures:
    """A job that is larger than Redis: submitted, encoded and drained at once, with the peaks of everybody's memory."""
    import pyarrow.parquet as pq

    with service(workers=workers, dim=dim) as of, ExitStack() as stack:
        client = stack.enter_context(Broker.connect(of.settings).connection.client())
        client.config_set("maxmemory", maxmemory)
        client.config_resetstat()
        corpus, parts = of.folder / "corpus.jsonl", of.folder / "parts"
        corpus.write_text("".join(f'{{"text": "passage {number}"}}\n' for number in range(records)))
        command = [sys.executable, "-m", "embedctl"]
        variables = {**os.environ, "EMBEDCTL_REDIS_URL": of.settings.redis_url}
        given = ["submit", str(corpus), "--class", DUMMY, "--model", DUMMY, "-q", "--drain", "--resume", "x"]
        began = time.monotonic()
        producer = subprocess.Popen([*command, *given], env=variables, stdout=subprocess.DEVNULL)
        while not (ids := cast("list[bytes]", client.zrange(keys.JOBS, 0, -1))):
            time.sleep(0.05)
        given = ["fetch", ids[0].decode(), "-o", f"{parts}/", "-q"]
        drainer = subprocess.Popen([*command, *given], env=variables)
        peaks = {}
        for name, process in (("producer", producer), ("drainer", drainer)):
            _, status, usage = os.wait4(process.pid, 0)
            assert status == 0, f"the {name} failed"
            peaks[f"{name}: peak MiB"] = usage.ru_maxrss / 1024
        seconds = time.monotonic() - began
        seen = np.zeros(records, np.uint8)
        for path in parts.glob("part-*.parquet"):
            seen[pq.read_table(path, columns=["position"])["position"].to_numpy()] += 1
        assert (seen == 1).all(), "a position is missing or there twice"
        return {
            "records/s": records / seconds,
            "Redis: peak MiB": client.info("memory")["used_memory_peak"] / 2**20,
            **peaks,
            "parts": len(list(parts.glob("part-*.parquet"))),
            "parts MiB": sum(path.stat().st_size for path in parts.iterdir()) / 2**20,
        }
