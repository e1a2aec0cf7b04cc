"""Probes of an engine: its CPU time beside other systems' and in a job, where that goes, and what it chooses."""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.ours.service import Figures, cpu_s_of, service

from embedctl import enqueue_embeddings
from embedctl.operating.local import local_worker
from embedctl.queueing.broker import Broker
from embedctl_bench.engines import count_of
from embedctl_bench.measuring.machine import cpu_seconds
from embedctl_bench.measuring.sampling import least
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl import EngineAdapter
from embedctl_bench.peers.models import measured_model, model_files, peers_folder
from embedctl_bench.peers.registry import FLOORS, PEERS, System, engine_of
from embedctl_bench.peers.tuned import Task, TunedSystem
from embedctl_bench.texts.workloads import make_workload
from embedctl_config.settings import Settings
from embedctl_workers.backends.torch.kept import kept_model
from embedctl_workers.backends.torch.packed import choosing, fused, kernels, linear, native, tiles
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.devices import usable_cpus
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import cache_folder, private_folder

_PRODUCTS, _FUSED = "products with their biases", "products with what follows them (GELU, residual, LayerNorm)"
#: Function of a library → the part that it computes.
_PARTS: Mapping[str, str] = {
    "embed": "embeddings",
    "attention": "attention",
    "int8_attention": "attention",
    "add_layer_norm": "residual and LayerNorm",
    "gelu": "GELU",
    "project": _PRODUCTS,
    "fused_linear": _PRODUCTS,
    "finish": _FUSED,
    "fused_rest": _FUSED,
}


def engine_profile(
    *, model: str = "all-MiniLM-L6-v2", hardware: str = "cpu", workload: str = "W1", quick: bool = False
) -> Figures:
    """Where the CPU time of a worker's engine goes, on one thread: its parts as shares of the whole.

    Calls into the compiled libraries and torch's products are timed; what is left is Python, pooling and torch's views.
    A part that a library computes in one pass with its products, such as GELU, has no time of its own.
    """
    torch.set_num_threads(1)
    task = task_of(model, workload, quick=quick)
    texts = task.workload.texts
    spent: defaultdict[str, float] = defaultdict(float)
    with _timed(spent):
        engine = alone(task, 1, hardware)
        engine.encode(texts[: len(texts) // 4 + 1])
        spent.clear()
        began = time.thread_time()
        engine.encode(texts)
        whole = time.thread_time() - began
    spent["everything else"] = whole - sum(spent.values())
    shares = {f"share of {part}": part_s / whole for part, part_s in sorted(spent.items(), key=lambda each: -each[1])}
    return {**shares, "tokens/s": task.workload.tokens / whole}


@contextmanager
def _timed(spent: defaultdict[str, float]) -> Iterator[None]:
    """Inside it, engines that are loaded add the seconds of their parts to `spent`."""

    def timed(call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                spent[part] += time.thread_time() - began

        return run

    def library(*args: Any, **options: Any) -> ctypes.CDLL:
        found = native.library(*args, **options)
        for name, part in _PARTS.items():
            if hasattr(found, name):
                setattr(found, name, timed(getattr(found, name), part))
        return found

    with ExitStack() as stack:
        for module in (kernels, tiles, fused):
            stack.enter_context(patch.object(module, "library", library))
        for product in (linear.BlasLinear, linear.OneDnnLinear, linear.OneDnnBf16Linear):
            stack.enter_context(patch.object(product, "__call__", timed(product.__call__, _PRODUCTS)))
        stack.enter_context(patch.object(ChunkEncoder, "prepare", timed(ChunkEncoder.prepare, "tokenising")))
        yield


def pipeline_cost(
    *, model: str = "all-MiniLM-L6-v2", workload: str = "W1", records: int = 10_000, threads: int = 1
) -> Figures:
    """CPU seconds for 1,000 texts: of a job's producer, Redis and worker, and of the engine alone, both warm."""
    task = task_of(model, workload, records)
    texts = task.workload.texts
    warming = texts[: len(texts) // 10]
    found: Figures = {}
    with service() as ours:
        settings = ours.settings.replace(hardware="cpu")
        way: dict[str, Any] = {"model": str(task.model.folder), "hardware": "cpu", "settings": settings}
        options = ["--threads", str(threads)]
        log = ours.folder / "worker.log"
        with local_worker(ours.settings, hardware="cpu", model=way["model"], options=options, log_file=log):
            with closing(Broker.connect(ours.settings)) as broker, broker.connection.client() as client:
                worker = next(iter(broker.workers.alive())).pid
                pids = {"producer": os.getpid(), "Redis": int(client.info("server")["process_id"]), "worker": worker}
            enqueue_embeddings(warming, **way).wait()
            before = {name: cpu_s_of(pid) for name, pid in pids.items()}
            began = time.perf_counter()
            enqueue_embeddings(texts, **way).results()
            found["texts/s, whole"] = len(texts) / (time.perf_counter() - began)
            spent = {name: cpu_s_of(pid) - before[name] for name, pid in pids.items()}
    engine = alone(task, threads, "cpu")
    engine.encode(warming)
    cpu_s, began = time.process_time(), time.perf_counter()
    engine.encode(texts)
    found["texts/s, engine alone"] = len(texts) / (time.perf_counter() - began)
    spent["engine alone"] = time.process_time() - cpu_s
    found |= {f"CPU s of the {name} for 1,000 texts": each / len(texts) * 1000 for name, each in spent.items()}
    engine_s = spent.pop("engine alone")
    return found | {"engine alone / whole, CPU s": engine_s / sum(spent.values())}


def engines_by_cpu(
    *,
    model: str = "all-MiniLM-L6-v2",
    classes: str = "cpu",
    peers: str = "ctranslate2,st-openvino",
    workload: str = "W1",
    rounds: int = 7,
    tries: int = 0,
    floor: bool = True,
    quick: bool = False,
) -> Figures:
    """CPU seconds of engines for the same texts, on one thread each, by turns, the least of so many rounds.

    Each setting of one process is a contender of its own, and so is each product of the floor; a system's figure is
    that of its fastest setting, of the first `tries` (0: of all). Ratios are of the first class to each other system.
    """
    task = task_of(model, workload, quick=quick)
    ours = [engine_of(name, Settings()) for name in classes.split(",")]
    floors = [each for each in FLOORS if floor and each.precision in {own.precision for own in ours}]
    with ExitStack() as stack:
        running = []
        for system in (*ours, *(PEERS[name] for name in peers.split(",") if name), *floors):
            for single in _single(system)[: tries or None]:
                tuned = TunedSystem(single, task)
                stack.callback(tuned.close)
                running.append((system.name, partial(_encode, tuned)))
        seconds = least(running, rounds)
    own = seconds[ours[0].name]
    thousands = len(task.workload.lengths) / 1000
    found = {f"{name}: CPU s for 1,000 texts": each / thousands for name, each in seconds.items()}
    return found | {f"{ours[0].name} x {name}": each / own for name, each in seconds.items() if name != ours[0].name}


def _single(system: System) -> list[System]:
    """The system with each of its settings of one process."""
    settings = [each for each in system.settings if each.processes == 1 and each.load.get("workers", 1) == 1]
    return [replace(system, settings=(each,)) for each in settings]


def _encode(tuned: TunedSystem) -> float:
    """Encode the texts once: the CPU seconds of the system's process."""
    (pid,) = tuned.pids
    before = cpu_seconds(pid)
    tuned.encode()
    return cpu_seconds(pid) - before


def choices(*, model: str = "all-MiniLM-L6-v2", bf16: bool = False, tries: int = 30) -> Figures:
    """How often each way to compute a model's layers is chosen when it is chosen again and again. Nothing is kept.

    In fp32, torch's products are compared with ours on every CPU. The model has been loaded here before, so that its
    weights are kept.
    """
    host = Host(1, cache_folder(Settings()), build=False)
    kept = kept_model(model_files(model, Settings()), host)
    if kept is None:
        raise SystemExit(f"load it once: embedctl model verify {model}")
    chooser = choosing.Chooser(kept.weights, kernels.load_kernels(host), host)
    found: Counter[str] = Counter()
    with patch.object(choosing, "noted", lambda *_: None), patch.object(choosing, "OURS_FASTER", frozenset({""})):
        for _ in range(tries):
            kind = chooser.bf16() if bf16 else chooser.fp32()
            found[kind.name] += 1
    shown = {f"chosen: {name}": float(times) for name, times in found.items()}
    return {**shown, "load of the machine": os.getloadavg()[0]}


def task_of(model: str, workload: str, texts: int = 0, *, quick: bool = False) -> Task:
    """So many texts of a workload, or as many as `bench engines` has, for one CPU."""
    place = private_folder(peers_folder(Settings()))
    measured = measured_model(model, Settings(), place)
    load = make_workload(workload, texts or count_of(workload, measured, quick=quick), measured, place)
    return Task(measured, load, [min(usable_cpus(None))], place)


def alone(task: Task, threads: int, hardware: str) -> EngineAdapter:
    """A worker's engine in this process."""
    settings = Settings()
    entry = asdict(settings.hardware_class(hardware))
    cache = str(cache_folder(settings))
    return EngineAdapter(task.model.folder, threads, task.workload.chunk, cache, hardware, entry)
