"""How fast a corpus can be queued: `submit` with no worker running, against a bare parse loop.

    python benchmarks/ours/submit_rate.py [--records 200000] [--pairs 5]

Both sides read the same jsonl file of 50- to 100-byte texts. The bare loop is `json.loads` of every line and nothing
else. Submitting runs in this process, with a Redis beside it on the same machine; it checks the file first, as the
command line does. Pairs are interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from embedctl.broker import Broker
from embedctl.corpus import open_corpus
from embedctl.enqueue import submit
from embedctl.job_options import SubmitOptions
from embedctl.local import private_redis
from embedctl_config.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        _write_corpus(path, arguments.records)
        with private_redis(Settings(), Path(folder)) as settings:
            broker = Broker.connect(settings)
            rates, shares = [], []
            for pair in range(arguments.pairs):
                parse_s, submit_s = _parse(path), _submit(broker, path)
                rates.append(arguments.records / submit_s)
                shares.append(parse_s / submit_s)
                print(f"pair {pair + 1}: parse {parse_s:.2f} s, submit {submit_s:.2f} s, {rates[-1]:,.0f} records/s")
            broker.close()
    print(
        f"median {statistics.median(rates):,.0f} records/s (min {min(rates):,.0f}, max {max(rates):,.0f}); "
        f"{statistics.median(shares):.2f} of a bare parse loop's rate; {arguments.records:,} records of 50 to 100 bytes"
    )
    print(
        f"{os.cpu_count()} CPUs, Redis on the same; Python {platform.python_version()}, redis-py {version('redis')}, "
        f"kombu {version('kombu')}"
    )


def _write_corpus(path: Path, records: int) -> None:
    rng = random.Random(0)
    words = ["cat", "mat", "while", "dogs", "were", "barking", "at", "some", "distant", "cloud", "over", "our", "house"]
    with path.open("w") as stream:
        for number in range(records):
            text = " ".join(rng.choices(words, k=20))[: rng.randint(50, 100)]
            stream.write(json.dumps({"id": number, "text": text}) + "\n")


def _parse(path: Path) -> float:
    started = time.perf_counter()
    with path.open("rb") as stream:
        for line in stream:
            json.loads(line)
    return time.perf_counter() - started


def _submit(broker: Broker, path: Path) -> float:
    started = time.perf_counter()
    corpus = open_corpus(str(path), max_bytes=broker.settings.max_text_bytes)
    corpus.check()
    job = submit(broker, corpus.records(), SubmitOptions(model="none", hardware="cpu"))
    seconds = time.perf_counter() - started
    job.discard()
    return seconds


if __name__ == "__main__":
    main()
