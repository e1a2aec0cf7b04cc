"""How long one text takes to be queued: `enqueue_embeddings`, warm, with no worker running.

    python benchmarks/ours/submit_latency.py [--calls 200] [--other CHECKOUT]

Redis runs beside it on the same machine. With --other, the code of another checkout takes turns with this one's. Each
turn is a process of its own, which makes ten calls to warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from embedctl import enqueue_embeddings
from embedctl.local import private_redis
from embedctl_config.settings import Settings

_TURNS = 5
_WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--turn", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        print(json.dumps(_turn(arguments.turn, arguments.calls)))
        return
    sides = {"this": Path(__file__).parents[2], **({"other": arguments.other} if arguments.other else {})}
    found: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder, private_redis(Settings(), Path(folder)) as settings:
        for _ in range(_TURNS):
            for name, checkout in sides.items():
                found[name] += _in_a_process(checkout.resolve(), settings.redis_url, arguments.calls // _TURNS)
    for name, times in found.items():
        tenth, ninth = statistics.quantiles(times, n=10)[0], statistics.quantiles(times, n=10)[-1]
        print(
            f"{name}: median {statistics.median(times):.2f} ms (a tenth below {tenth:.2f}, a tenth above {ninth:.2f}), "
            f"{len(times)} calls"
        )
    print(
        f"{os.cpu_count()} CPUs, Redis on the same; Python {platform.python_version()}, redis-py {version('redis')}, "
        f"kombu {version('kombu')}"
    )


def _in_a_process(checkout: Path, url: str, calls: int) -> list[float]:
    path = os.pathsep.join(str(checkout / part) for part in ("producer", "workers", "config"))
    command = [sys.executable, __file__, "--turn", url, "--calls", str(calls)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    times: list[float] = json.loads(done.stdout)
    return times


def _turn(url: str, calls: int) -> list[float]:
    """Milliseconds of each call, without the calls that warm up."""
    settings = Settings(redis_url=url, hardware="cpu")
    times = []
    for _ in range(_WARM_UP + calls):
        began = time.perf_counter()
        enqueue_embeddings(["The weather was fine until noon."], settings=settings)
        times.append((time.perf_counter() - began) * 1000)
    return times[_WARM_UP:]


if __name__ == "__main__":
    main()
