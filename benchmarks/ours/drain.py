"""A job that is larger than Redis: submitted, encoded and drained at once, with the peaks of everybody's memory.

    python benchmarks/ours/drain.py [--records 2000000] [--dim 384] [--maxmemory 128mb] [--workers 1]

A private Redis, workers without a model, a producer (`embedctl submit --drain`) and a drainer
(`embedctl fetch --drain`) on this machine. At the end, a reader of the parts alone counts every position.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow.parquet as pq
import redis

from embedctl.local import local_worker, private_redis
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--maxmemory", default="128mb")
    parser.add_argument("--high-water", type=int, default=16 * 1024 * 1024, help="bytes of waiting text")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the corpus and the parts go; default: a temporary folder")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "embedctl.toml"
        config.write_text(f'[classes.dummy]\nbackend = "dummy"\noptions = {{dim = {options.dim}}}\n')
        os.environ |= {"EMBEDCTL_CONFIG": str(config), "EMBEDCTL_HIGH_WATER_BYTES": str(options.high_water)}
        corpus = folder / "corpus.jsonl"
        with corpus.open("w") as stream:
            for number in range(options.records):
                stream.write(f'{{"text": "passage {number}"}}\n')
        classes = {"dummy": HardwareClass(backend="dummy", options={"dim": options.dim})}
        plain = Settings(model="dummy", hardware="dummy", classes=classes)
        settings = stack.enter_context(private_redis(plain, folder))
        client = redis.Redis.from_url(settings.redis_url)
        client.config_set("maxmemory", options.maxmemory)
        os.environ["EMBEDCTL_REDIS_URL"] = settings.redis_url
        for number in range(options.workers):
            log = folder / f"worker-{number}.log"
            stack.enter_context(local_worker(settings, hardware="dummy", model="dummy", cpus=None, log_file=log))
        _measure(client, corpus, folder / "parts", options.records)


def _measure(client: redis.Redis, corpus: Path, parts: Path, records: int) -> None:
    client.config_resetstat()
    command = [sys.executable, "-m", "embedctl"]
    began = time.monotonic()
    key = ["--resume", "drain"]
    common = ["--class", "dummy", "--model", "dummy", "-q", "--drain"]
    producer = subprocess.Popen([*command, "submit", str(corpus), *common, *key], stdout=subprocess.PIPE, text=True)
    ids: list[bytes] = []
    while not ids:
        time.sleep(0.05)
        ids = cast("list[bytes]", client.zrange("embed:jobs", 0, -1))  # this client decodes nothing
    drainer = subprocess.Popen([*command, "fetch", ids[0].decode(), "-o", f"{parts}/", "--drain", "-q"])
    used, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            used[0] = max(used[0], client.info("memory")["used_memory"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    peaks = {}
    for name, process in (("producer", producer), ("drainer", drainer)):
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0, f"the {name} failed"
        peaks[name] = usage.ru_maxrss * 1024
    seconds = time.monotonic() - began
    over.set()
    watcher.join()
    seen = np.zeros(records, np.uint8)
    for path in parts.glob("part-*.parquet"):
        seen[pq.read_table(path, columns=["position"])["position"].to_numpy()] += 1
    assert (seen == 1).all(), "a position is missing or there twice"
    facts = {
        "records": records,
        "seconds": round(seconds, 1),
        "records_per_s": round(records / seconds),
        "used_memory_peak_mib": round(client.info("memory")["used_memory_peak"] / 2**20, 1),
        "used_memory_sampled_mib": round(used[0] / 2**20, 1),
        **{f"{name}_rss_peak_mib": round(peak / 2**20) for name, peak in peaks.items()},
        "parts": len(list(parts.glob("part-*.parquet"))),
        "parts_mib": round(sum(path.stat().st_size for path in parts.iterdir()) / 2**20),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
