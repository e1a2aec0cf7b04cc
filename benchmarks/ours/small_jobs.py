"""Many small jobs against one job with the same texts, and how long one text takes from its submission to its vector.

    python benchmarks/ours/small_jobs.py [--model all-MiniLM-L6-v2] [--rounds 5] [--other CHECKOUT]

Redis, one worker of class `cpu` and the callers share the machine's cores. A caller submits a job, waits for its
vectors, and goes on with its next job. Both ways take turns; a ratio is that of neighbouring turns. The CPU time of
each part is told too: on a busy machine it varies less than rates do. With --other, all is run with the code of another
checkout, too, with a worker of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from embedctl import enqueue_embeddings
from embedctl.local import local_worker, private_redis
from embedctl_config.settings import Settings

_WARM_UP = 10
_PARTS = ("callers", "worker", "Redis")
_WORDS = """
    the of and in to is it on for as at by an or be we he if so but can had has have her his its may new not now old
    river valley station winter market bridge letter garden harbour village evening machine window paper student
""".split()  # noqa: SIM905  (as a list it would be a page long)


@dataclass(frozen=True, slots=True)
class Load:
    """Jobs that callers submit at the same time: `sizes` are their texts."""

    name: str
    callers: int
    sizes: tuple[int, ...]


def main() -> None:
    arguments = _arguments()
    if arguments.turn:
        json.dump(_turn(arguments), sys.stdout)
        return
    sides = {"this": Path(__file__).parents[2], **({"other": arguments.other} if arguments.other else {})}
    for name, checkout in sides.items():
        _report(name, _in_a_process(checkout.resolve()))
    print(
        f"{os.cpu_count()} CPUs, for all; Python {platform.python_version()}, celery {version('celery')}, kombu "
        f"{version('kombu')}, redis-py {version('redis')}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--jobs", type=int, default=512, help="jobs of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--singles", type=int, default=200, help="texts that are submitted one after the other")
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(checkout: Path) -> dict[str, dict[str, list[float]]]:
    path = os.pathsep.join(str(checkout / part) for part in ("producer", "workers", "config"))
    command = [sys.executable, __file__, *sys.argv[1:], "--turn"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout)
    return found


def _report(side: str, found: dict[str, dict[str, list[float]]]) -> None:
    for name, figures in found.items():
        if "many" in figures:
            ratios = [many / one for many, one in zip(figures["many"], figures["one"], strict=True)]
            print(
                f"{side}: {name}: {statistics.median(figures['many']):,.0f} texts/s, one job "
                f"{statistics.median(figures['one']):,.0f}; ratio {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}); a job's p50 {_percentile(figures['waits'], 50):.0f} ms, "
                f"p99 {_percentile(figures['waits'], 99):.0f} ms"
            )
            for way in ("many", "one"):
                used = [statistics.median(figures[f"cpu_{way}"][at :: len(_PARTS)]) for at in range(len(_PARTS))]
                parts = ", ".join(f"{name} {ms:.2f}" for name, ms in zip(_PARTS, used, strict=True))
                print(f"{side}: {name}: {'one job' if way == 'one' else 'jobs'}: CPU ms a text: {parts}")
        else:
            waits = figures["waits"]
            print(f"{side}: {name}: p50 {_percentile(waits, 50):.1f} ms, p99 {_percentile(waits, 99):.1f} ms")


def _percentile(times: Sequence[float], percent: int) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1]


def _turn(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Everything, with the code that this process has: texts/s of each turn, and ms of each job."""
    draw = random.Random(7)
    loads = [
        Load("64 callers, jobs of 4 texts", 64, (4,) * arguments.jobs),
        Load("100 callers, jobs of 1 to 8 texts", 100, tuple(draw.randint(1, 8) for _ in range(arguments.jobs))),
    ]
    with tempfile.TemporaryDirectory() as folder, private_redis(Settings(), Path(folder)) as settings:
        log_file = Path(folder) / "worker.log"
        with local_worker(settings, hardware=arguments.hardware, model=arguments.model, cpus=None, log_file=log_file):
            encode = partial(_encode, settings, arguments)
            for _ in range(_WARM_UP):
                encode(_texts(draw, 8))
            found = {
                "one text": {"waits": [_seconds(encode, _texts(draw, 1)) * 1000 for _ in range(arguments.singles)]}
            }
            return found | {load.name: _rounds(load, draw, encode, arguments.rounds) for load in loads}


def _rounds(
    load: Load, draw: random.Random, encode: Callable[[list[str]], None], rounds: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ("many", "one", "waits", "cpu_many", "cpu_one")}
    with ThreadPoolExecutor(load.callers) as callers:
        for _ in range(rounds):
            jobs = [_texts(draw, size) for size in load.sizes]
            texts = [text for job in jobs for text in job]
            began, before = time.perf_counter(), _cpu_s()
            found["waits"] += [seconds * 1000 for seconds in callers.map(partial(_seconds, encode), jobs)]
            found["many"].append(len(texts) / (time.perf_counter() - began))
            between = _cpu_s()
            found["one"].append(len(texts) / _seconds(encode, texts))
            after = _cpu_s()
            found["cpu_many"] += [(between[each] - before[each]) / len(texts) * 1000 for each in _PARTS]
            found["cpu_one"] += [(after[each] - between[each]) / len(texts) * 1000 for each in _PARTS]
    return found


def _cpu_s() -> dict[str, float]:
    """CPU seconds of the callers and of this process's children, so far."""
    used = {"callers": time.process_time(), "worker": 0.0, "Redis": 0.0}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, facts = stat.read_text().split("(", 1)[1].rsplit(")", 1)
            fields = facts.split()
            if int(fields[1]) == os.getpid():
                part = "Redis" if "redis" in name else "worker"
                used[part] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def _encode(settings: Settings, arguments: argparse.Namespace, texts: list[str]) -> None:
    job = enqueue_embeddings(texts, model=arguments.model, hardware=arguments.hardware, settings=settings)
    job.wait()
    assert len(job.vectors()) == len(texts)


def _seconds(encode: Callable[[list[str]], None], texts: list[str]) -> float:
    began = time.perf_counter()
    encode(texts)
    return time.perf_counter() - began


def _texts(draw: random.Random, count: int) -> list[str]:
    """Texts of 10 to 30 words, one token each."""
    return [" ".join(draw.choices(_WORDS, k=draw.randint(10, 30))) for _ in range(count)]


if __name__ == "__main__":
    main()
