"""Small measurements of the product, each a function that returns figures by name.

    python -m benchmarks.ours.probes NAME [--set records=1000] [--rounds 5] [--other CHECKOUT]

Redis, workers and callers share this machine's CPUs. A probe runs once a round, in a process that stays. With --other,
the code of another checkout takes turns with this one's, in alternating order, and ratios are of the same round.
Figures are medians of the rounds, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
from benchmarks.ours.service import DUMMY, machine_line, serve, service, sides

from embedctl import Job, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.corpus import open_corpus
from embedctl.enqueue import submit
from embedctl.job_options import SubmitOptions
from embedctl.local import local_worker
from embedctl.results import ChunkVectors
from embedctl_bench.measuring.machine import cpu_seconds
from embedctl_bench.measuring.sampling import turn_of
from embedctl_bench.peers.models import measured_model, peers_folder
from embedctl_bench.peers.registry import engine_of
from embedctl_bench.peers.tuned import TunedProcess
from embedctl_bench.peers.workload import Workload, kept
from embedctl_bench.report import grid
from embedctl_bench.texts.passages import passages
from embedctl_bench.texts.words import draw_words
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_workers.models.cache import private_folder

Figures = dict[str, float]
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
            return {
                **found,
                "bytes in": stats["total_net_input_bytes"],
                "bytes out": stats["total_net_output_bytes"],
            }

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

        while broker.connection.uptime_s() < 2 * of.settings.lease_s:  # no reaper acts so soon after Redis started
            time.sleep(1)
        for trial in range(kills):
            with of.worker(f"{trial}-0"), of.worker(f"{trial}-1"):
                job = enqueue_embeddings(iter(texts), settings=of.settings)  # a list would be divided among both
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
                waited.append(time.monotonic() - killed)
                job.cancel()
    return {"p50 s": statistics.median(waited), "p95 s": _percentile(waited, 95), "most s": max(waited)}


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
            corpus = open_corpus(str(path), max_bytes=of.settings.max_text_bytes)
            corpus.check()  # as the command line does
            submit(broker, corpus.records(), SubmitOptions(model="none", hardware="cpu"))
            broker.close()

        parse_s, queue_s = _seconds(parse), _seconds(queue)
    return {"records/s": records / queue_s, "share of the parse loop's rate": parse_s / queue_s}


def submit_latency(*, calls: int = 40) -> Figures:
    """How long one text takes to be queued, warm, with no worker running."""
    with service() as of:

        def queue() -> None:
            enqueue_embeddings(["The weather was fine until noon."], settings=of.settings, hardware="cpu")

        taken = [1000 * _seconds(queue) for _ in range(10 + calls)][10:]
    return {"p50 ms": statistics.median(taken), "p90 ms": _percentile(taken, 90)}


def formats(*, records: int = 100_000, dim: int = 384, form: str = "parquet") -> Figures:
    """How fast vectors are written as `fetch` writes them, and how large their file is."""
    module = import_module(f"embedctl.output.{form}")
    generator, seconds, cpu = np.random.default_rng(0), 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"vectors.{form}"
        writer = getattr(module, f"{form.capitalize()}Writer")(path, records, None)
        for first in range(0, records, 512):
            positions = np.arange(first, min(first + 512, records))
            vectors = generator.standard_normal((len(positions), dim), np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            chunk = ChunkVectors(positions, [f"id-{at}" for at in positions], vectors, [], [])
            began = time.process_time()
            seconds += _seconds(partial(writer.write, chunk))
            cpu += time.process_time() - began
        began = time.process_time()
        seconds += _seconds(writer.finish)
        cpu += time.process_time() - began
        size = path.stat().st_size
    return {
        "bytes, of the raw ones": size / (records * dim * 4),
        "records/s": records / seconds,
        "records per CPU second": records / cpu,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


def small_jobs(*, jobs: int = 512, singles: int = 200, model: str = _MODEL, hardware: str = "cpu") -> Figures:
    """Many small jobs against one job with the same texts, and one text from its submission to its vector.

    A caller submits a job, waits for its vectors, and goes on with its next job.
    """
    draw = random.Random(7)
    mixed = [draw.randint(1, 8) for _ in range(jobs)]
    loads = {"64 callers of 4": (64, [4] * jobs), "100 callers of 1 to 8": (100, mixed)}
    with _real_worker(model, hardware) as settings:

        def texts(count: int) -> list[str]:
            return [draw_words(draw, draw.randint(10, 30)) for _ in range(count)]

        def encode(given: list[str]) -> float:
            began = time.perf_counter()
            job = enqueue_embeddings(given, model=model, hardware=hardware, settings=settings)
            job.wait()
            assert len(job.vectors()) == len(given)
            return time.perf_counter() - began

        for _ in range(10):
            encode(texts(8))
        alone = [1000 * encode(texts(1)) for _ in range(singles)]
        found = {"one text, p50 ms": statistics.median(alone), "one text, p99 ms": _percentile(alone, 99)}
        for name, (callers, sizes) in loads.items():
            many = [texts(size) for size in sizes]
            together = [text for job in many for text in job]
            with ThreadPoolExecutor(callers) as pool:
                before, began = _cpu_by_part(), time.perf_counter()
                waits = list(pool.map(encode, many))
                many_s = time.perf_counter() - began
            after = _cpu_by_part()
            one_s = encode(together)
            found |= {
                f"{name}: texts/s": len(together) / many_s,
                f"{name}: rate, of one job's": one_s / many_s,
                f"{name}: a job's p50 ms": 1000 * statistics.median(waits),
                f"{name}: a job's p99 ms": 1000 * _percentile(waits, 99),
            }
            for part, spent in after.items():
                found[f"{name}: CPU ms a text, {part}"] = 1000 * (spent - before[part]) / len(together)
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


def queue_overhead(*, records: int = 4096, model: str = _MODEL, hardware: str = "cpu") -> Figures:
    """A job through Redis and a warm worker, against the same engine called in a process beside it."""
    settings = Settings()
    place = private_folder(peers_folder(settings))
    measured = measured_model(model, settings, place)
    texts = [text for _, text in islice(passages(), records)]
    workload = Workload("passages", kept(texts, place, "passages"), measured.lengths(texts), settings.chunk_size)
    engine = engine_of(hardware, settings)
    alone = replace(engine, settings=engine.settings[:1])
    direct = TunedProcess(alone, measured, workload, sorted(os.sched_getaffinity(0)), place)
    try:
        with _real_worker(str(measured.folder), hardware) as queued:
            ratios, difference = [], 0.0
            for turn in range(3):  # the first warms up
                done = direct.encode()
                job = enqueue_embeddings(texts, model=str(measured.folder), hardware=hardware, settings=queued)
                status, vectors = job.wait(), job.vectors()
                assert status.started_at
                assert status.ended_at
                if turn:
                    ratios.append((status.ended_at - status.started_at).total_seconds() / done.seconds)
                    difference = max(difference, float(np.abs(vectors - done.vectors).max()))
    finally:
        direct.close()
    return {"time, × the engine's": statistics.median(ratios), "largest difference": difference}


def gpu_batch(*, shape: str = "bge-base-shape", tokens: int = 32_768, length: int = 0, cpu: bool = False) -> Figures:
    """What a GPU makes of a batch of the engine for packed tokens: of W1's lengths, or of texts of one length."""
    from benchmarks.ours.gpu_probe import gpu_batch as measured  # torch is for this probe alone

    return measured(shape, tokens, length, cpu=cpu)


#: By the name on the command line.
PROBES: Mapping[str, Callable[..., Figures]] = {
    probe.__name__: probe
    for probe in (
        redis_calls,
        recovery,
        submit_rate,
        submit_latency,
        formats,
        small_jobs,
        drain,
        queue_overhead,
        gpu_batch,
    )
}


def main() -> None:
    """Run the command line."""
    rows = "\n".join(f"  {name}{inspect.signature(probe)}: {_first_line(probe)}" for name, probe in PROBES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{rows}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=PROBES)
    parser.add_argument("--set", dest="options", action="append", default=[], metavar="NAME=VALUE", help="repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="another checkout")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(lambda request: PROBES[request["name"]](**request["options"]))
        return
    if not asked.name:
        parser.error(f"name a probe: {', '.join(PROBES)}")
    options = _options(PROBES[asked.name], asked.options, parser)
    found: dict[str, list[Figures]] = {}
    print(machine_line(), flush=True)
    with sides("benchmarks.ours.probes", asked.other) as running:
        for number in range(asked.rounds):
            for side in turn_of(list(running), number):
                found.setdefault(side, []).append(running[side].call(name=asked.name, options=options))
    print(f"{asked.name} {json.dumps(options)}: {_first_line(PROBES[asked.name])}\n\n{table(found)}")


def table(found: Mapping[str, Sequence[Figures]]) -> str:
    """A row for each figure: of each side in words, and the ratio of the two in the same rounds."""
    names = sorted(found, reverse=True)  # this before other
    rows = []
    for figure in found[names[0]][0]:
        values = [[each.get(figure, float("nan")) for each in found[name]] for name in names]
        if len(values) > 1:
            values.append([a / b if b else float("nan") for a, b in zip(*values, strict=True)])
        rows.append(
            [figure, *(f"{statistics.median(each):,.4g} ({min(each):,.4g}–{max(each):,.4g})" for each in values)]
        )
    return grid(["figure", *names, *([" / ".join(names)] if len(names) > 1 else [])], rows)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.4g} ({min(values):,.4g}–{max(values):,.4g})"


def _options(probe: Callable[..., Figures], given: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """A probe's options by name; each is of the type of its default."""
    defaults = {name: each.default for name, each in inspect.signature(probe).parameters.items()}
    found = {}
    for each in given:
        name, _, text = each.partition("=")
        if name not in defaults:
            parser.error(f"--set {name}: {probe.__name__} has {', '.join(defaults)}")
        kind = type(defaults[name])
        try:
            found[name] = text in ("1", "true", "yes") if kind is bool else kind(text)
        except ValueError:
            parser.error(f"--set {each}: it is no {kind.__name__}")
    return found


def _first_line(probe: Callable[..., Figures]) -> str:
    return inspect.getdoc(probe).partition("\n")[0]  # type: ignore[union-attr]  # every probe has one


@contextmanager
def _real_worker(model: str, hardware: str) -> Iterator[Settings]:
    """A private Redis and a worker with a model; the settings that lead there."""
    with service() as of:
        log = of.folder / "worker.log"
        with local_worker(of.settings, hardware=hardware, model=model, cpus=None, log_file=log):
            yield of.settings


def _cpu_by_part() -> Figures:
    """CPU seconds so far of the callers in this process, and of the worker and the Redis that it started."""
    used = {"callers": time.process_time(), "worker": 0.0, "Redis": 0.0}
    for child in psutil.Process().children():
        used["Redis" if "redis" in child.name() else "worker"] += cpu_seconds(child.pid)
    return used


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _percentile(values: Sequence[float], percent: int) -> float:
    return float(np.percentile(values, percent))


if __name__ == "__main__":
    main()
