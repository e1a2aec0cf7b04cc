"""How fast vectors are written, and how large their files are.

    python benchmarks/ours/formats.py [--records 100000] [--dimensions 384 1024] [--pairs 3] [--against CHECKOUT]

Random unit vectors, in chunks as workers send them, go to files as `fetch` writes them, without a Redis. Each writing
is a process of its own. `--against` names another checkout of this project; its code and ours then write in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import numpy as np

_HERE = Path(__file__).resolve().parents[2]
_CHUNK = 512
_FORMATS = ("npy", "jsonl", "parquet")
_OTHER, _OURS = "other", "this checkout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--dimensions", type=int, nargs="+", default=[384, 1024])
    parser.add_argument("--formats", nargs="+", choices=_FORMATS, default=["jsonl", "parquet"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        print(json.dumps(_write(arguments.write, arguments.records, arguments.dimensions[0])))
        return
    checkouts = {**({_OTHER: arguments.against} if arguments.against else {}), _OURS: _HERE}
    print("| format | dimensions | code | bytes / raw | records/s (lowest to highest) | per CPU second | peak MB |")
    print("| --- | --: | --- | --: | --: | --: | --: |")
    for file_format in arguments.formats:
        for dim in arguments.dimensions:
            found = defaultdict(list)
            for _ in range(arguments.pairs):
                for name, checkout in checkouts.items():
                    found[name].append(_in_child(checkout, file_format, arguments.records, dim))
            for name, runs in found.items():
                rates = [arguments.records / run["seconds"] for run in runs]
                cpu = statistics.median(run["cpu"] for run in runs)
                print(
                    f"| {file_format} | {dim:,} | {name} | {runs[0]['bytes'] / (arguments.records * dim * 4):.2f} | "
                    f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) | "
                    f"{arguments.records / cpu:,.0f} | {max(run['peak'] for run in runs) / 1e6:,.0f} |"
                )
    print(f"{arguments.records:,} records; {os.cpu_count()} CPUs; Python {platform.python_version()}")


def _in_child(checkout: Path, file_format: str, records: int, dim: int) -> dict[str, float]:
    """What one writing of a file cost: seconds, those of CPU, bytes of the file, and peak memory in bytes."""
    path = os.pathsep.join(str(checkout / each) for each in ("producer", "config"))
    command = [sys.executable, __file__, "--write", file_format, "--records", str(records), "--dimensions", str(dim)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _write(file_format: str, records: int, dim: int) -> dict[str, float]:
    from embedctl.results import ChunkVectors

    writer_class = getattr(import_module(f"embedctl.output.{file_format}"), f"{file_format.capitalize()}Writer")
    generator = np.random.default_rng(0)
    seconds = cpu = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"vectors.{file_format}"
        writer = writer_class(path, records, None)
        for first in range(0, records, _CHUNK):
            rows = min(_CHUNK, records - first)
            vectors = generator.standard_normal((rows, dim), np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            positions = np.arange(first, first + rows)
            chunk = ChunkVectors(positions, [f"id-{at}" for at in positions], vectors, [], [])
            began = time.perf_counter(), time.process_time()
            writer.write(chunk)
            seconds, cpu = seconds + time.perf_counter() - began[0], cpu + time.process_time() - began[1]
        began = time.perf_counter(), time.process_time()
        writer.finish()
        seconds, cpu = seconds + time.perf_counter() - began[0], cpu + time.process_time() - began[1]
        size = path.stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "bytes": size, "cpu": cpu, "peak": peak}


if __name__ == "__main__":
    main()
