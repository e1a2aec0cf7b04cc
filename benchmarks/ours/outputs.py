"""Probes of outputs: how fast vectors are written, and a job that is larger than Redis."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import cast

import numpy as np
from benchmarks.ours.service import DUMMY, Figures, seconds_of, service

from embedctl.destinations.writer import Content
from embedctl.queueing.broker import Broker
from embedctl.waiting.results import ChunkVectors
from embedctl_config import keys


def formats(*, records: int = 100_000, dim: int = 384, form: str = "parquet") -> Figures:
    """How fast vectors are written as `fetch` writes them, and how large their file is."""
    module = import_module(f"embedctl.destinations.{form}")
    generator, seconds, cpu = np.random.default_rng(0), 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"vectors.{form}"
        writer = getattr(module, f"{form.capitalize()}Writer")(Content(path, records))
        for first in range(0, records, 512):
            positions = np.arange(first, min(first + 512, records))
            vectors = generator.standard_normal((len(positions), dim), np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            chunk = ChunkVectors(positions, [f"id-{at}" for at in positions], vectors, [], [])
            began = time.process_time()
            seconds += seconds_of(partial(writer.write, chunk))
            cpu += time.process_time() - began
        began = time.process_time()
        seconds += seconds_of(writer.finish)
        cpu += time.process_time() - began
        size = path.stat().st_size
    return {
        "bytes, of the raw ones": size / (records * dim * 4),
        "records/s": records / seconds,
        "records per CPU second": records / cpu,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


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
