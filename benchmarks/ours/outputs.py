"""The probe of a drain: a job that is larger than Redis."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import cast

import numpy as np
from benchmarks.ours.service import DUMMY, Figures, service

from embedctl.queueing.broker import Broker
from embedctl_config import keys


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
