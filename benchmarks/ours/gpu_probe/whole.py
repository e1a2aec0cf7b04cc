"""Whole batches of the engine for packed tokens."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from benchmarks.ours.gpu_probe.batches import engine_of, tokens_of, uploaded
from benchmarks.ours.gpu_probe.device import NotHereError, Probed
from benchmarks.ours.gpu_probe.lengths import WORKLOADS, lengths_of

from embedctl_bench.measuring.shapes import ModelShape
from embedctl_workers.arrays.tokens import Rows
from embedctl_workers.backends.gpu.attention import Bucketed
from embedctl_workers.backends.gpu.compiled import compiler
from embedctl_workers.backends.gpu.graphs import Graphs
from embedctl_workers.backends.gpu.memory import MOST_TOKENS
from embedctl_workers.backends.gpu.packed import PackedGpuEngine

Run = Callable[[], torch.Tensor]
#: Prepares a batch of texts of these lengths with an engine that it may change, and returns what runs it.
Way = Callable[[PackedGpuEngine, Rows, Probed], Run]

#: Tokens of the batch that is run in several ways: few, so that the host's part shows. They nearly fill one of the
#: compiler's sizes.
_TOKENS_OF_WAYS = 8000


def batches(probed: Probed) -> None:
    """each model by the number of tokens of a batch: ms of the device, and of the host to pack and to begin it"""
    for name, shape in probed.shapes.items():
        engine = engine_of(shape, probed)
        for workload in WORKLOADS:
            for tokens in probed.sizes:
                _batch(f"{name} {workload}", shape, engine, lengths_of(workload, tokens), probed)


def graphs(probed: Probed) -> None:
    """a small batch of W1 run eagerly, as a CUDA graph captured by torch, and with graphs as by the class's option"""
    _compare({"eager": eager, "graph": captured, "option graphs": by_option}, probed)


def compiled(probed: Probed) -> None:
    """a small batch of W1 run eagerly, and compiled as by the class's option"""
    _compare({"eager": eager, "compiled": by_compiler}, probed)


def eager(engine: PackedGpuEngine, lengths: Rows, probed: Probed) -> Run:
    """As the engine runs by default."""
    batch = uploaded(engine, lengths, probed)
    return lambda: engine.run(batch.inputs, batch.facts)


def captured(engine: PackedGpuEngine, lengths: Rows, probed: Probed) -> Run:
    """Captured by torch as a CUDA graph of this batch."""
    if probed.trial:
        raise NotHereError("needs a GPU")
    run = eager(engine, lengths, probed)
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vectors = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return vectors

    return replay


def by_option(engine: PackedGpuEngine, lengths: Rows, probed: Probed) -> Run:
    """With its layers captured, as by the class's option `graphs`."""
    if Bucketed.NAME in engine.name:
        raise NotHereError(f"not captured, because it is {engine.name}")
    graphs = Graphs(probed.gpu)
    graphs.allow(MOST_TOKENS)
    engine.capture(graphs)
    run = eager(engine, lengths, probed)
    for _ in range(2):  # a size's second batch is captured
        run()
    return run


def by_compiler(engine: PackedGpuEngine, lengths: Rows, probed: Probed) -> Run:
    """With its layers compiled, as by the class's option `compile`."""
    if Bucketed.NAME in engine.name:
        raise NotHereError(f"not compiled, because it is {engine.name}")
    engine.compile(compiler())
    return eager(engine, lengths, probed)


def _compare(ways: Mapping[str, Way], probed: Probed) -> None:
    """Run a batch of each model in each of these ways."""
    for name, shape in probed.shapes.items():
        engine = engine_of(shape, probed)
        lengths = lengths_of("W1", min(probed.tokens, _TOKENS_OF_WAYS))
        expected = eager(engine, lengths, probed)().clone()
        for way, prepare in ways.items():
            print(f"{name}, {int(lengths.sum())} tokens, {way}:", end=" ", flush=True)
            began = time.monotonic()
            try:
                run = prepare(copy.copy(engine), lengths, probed)
            except NotHereError as why:
                print(why)
                continue
            run()
            probed.synchronize()
            ready = time.monotonic() - began
            device, host = probed.device_ms(run), probed.host_ms(run)
            error = (run() - expected).abs().max().item()
            print(f"device {device:.2f} ms, host {host:.2f} ms", end=", ")
            print(f"{ready:.1f} s until its first vectors, off by {error:.1e}", flush=True)


def _batch(what: str, shape: ModelShape, engine: PackedGpuEngine, lengths: Rows, probed: Probed) -> None:
    count, tokens = int(lengths.sum()), tokens_of(lengths)
    batch = uploaded(engine, lengths, probed)
    run = partial(engine.run, batch.inputs, batch.facts)
    device, host = probed.device_ms(run), probed.host_ms(run)
    pack = probed.host_ms(lambda: engine.batch(tokens, np.arange(len(lengths))))
    rate, operations = count / device / 1e3, _operations(shape, lengths)
    print(f"{what} {count:6d} tokens {len(lengths):5d} texts: device {device:7.2f} ms", end=", ")
    print(f"host {pack:5.2f} ms to pack and {host:6.2f} ms to begin it", end=", ")
    print(f"{rate:.2f} Mtok/s, {operations / device / 1e9:.1f} TFLOP/s", flush=True)


def _operations(shape: ModelShape, lengths: Rows) -> float:
    """Of the products with weights, and of attention."""
    products = 2 * 12 * shape.hidden**2 * float(lengths.sum())
    return shape.layers * (products + 4 * shape.hidden * float((lengths.astype(float) ** 2).sum()))
