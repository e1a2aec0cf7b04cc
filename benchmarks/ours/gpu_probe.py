"""The probe of a GPU: what it makes of single batches of the engine for packed tokens, on random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from benchmarks.ours.service import Figures, seconds_of
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel

from embedctl_bench.peers.models import MAX_TOKENS, SHAPES, model_files
from embedctl_bench.texts.workloads import mixed_lengths
from embedctl_config.hardware import SHIPPED_CLASSES
from embedctl_config.settings import Settings
from embedctl_workers.arrays.tokens import Ragged, Tokens
from embedctl_workers.backends.gpu.device import Gpu, open_gpu
from embedctl_workers.backends.gpu.packed import PackedGpuEngine
from embedctl_workers.backends.gpu.precision import full_precision
from embedctl_workers.backends.torch.packed.weights import weights_of
from embedctl_workers.measuring.flops import EncoderShape
from embedctl_workers.measuring.matrix_products import matrix_products

_WARM_UPS, _ROUNDS, _REPEATS = 3, 10, 20
#: Of the device's clock: some 20 ms.
_HEAD_START_CYCLES = 40_000_000
#: Mean length of W1's texts (tokens).
_MEAN = 39


def gpu_batch(*, shape: str = "bge-base-shape", tokens: int = 32_768, length: int = 0, cpu: bool = False) -> Figures:
    """What a GPU makes of a batch of the engine for packed tokens: of W1's lengths, or of texts of one length.

    That is ms of the device, and of the host to pack it and to begin it; and the device's rate. That the host waits for
    the device nowhere in a batch is checked, and that vectors stay the same. With cpu, the CPU stands in for a GPU, to
    see that the code works.
    """
    # All that the engine asks of a device, apart from tensors on it.
    stand_in = SimpleNamespace(device=torch.device("cpu"), name="CPU", varlen=False, synchronize=lambda: None)
    gpu = cast(Gpu, stand_in) if cpu else open_gpu()
    full_precision()
    size = SHAPES[shape]
    lengths = np.array([length] * -(-tokens // length) if length else mixed_lengths(-(-tokens // _MEAN)))
    with torch.inference_mode():
        engine = _engine(shape, gpu, torch.float32 if cpu else torch.bfloat16)
        ids = [np.arange(1000 + at, 1000 + at + each).tolist() for at, each in enumerate(lengths)]
        texts, rows = Tokens(lengths, np.zeros_like(lengths), {"input_ids": Ragged.of(ids)}), np.arange(len(lengths))
        batch = engine.batch(texts, rows)
        arrays = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.arrays.items()}
        inputs = {name: array.to(gpu.device, torch.int32) for name, array in arrays.items()}
        run = partial(engine.run, inputs, batch.facts)
        first = run().clone()
        worst = max(float((run() - first).abs().max()) for _ in range(_REPEATS))
        if not cpu:
            gpu.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        device_s = _device_s(run, gpu, cpu)
        flop = EncoderShape(size.hidden, 4 * size.hidden, size.layers).flop(lengths)
        products = matrix_products(SHIPPED_CLASSES["cpu" if cpu else "gpu"], torch.get_num_threads())
        assert not isinstance(products, str), products
        return {
            "device ms": 1e3 * device_s,
            "host ms to pack": 1e3 * _host_s(lambda: engine.batch(texts, rows), gpu),
            "host ms to begin": 1e3 * _host_s(run, gpu),
            "Mtok/s": int(lengths.sum()) / device_s / 1e6,
            "TFLOP/s": flop / device_s / 1e12,
            "TFLOP/s of a large product": products.rate(1.0) / 1e12,
            "off by, when repeated": worst,
        }


def _engine(shape: str, gpu: Gpu, dtype: torch.dtype) -> PackedGpuEngine:
    weights = weights_of(AutoModel.from_pretrained(model_files(shape, Settings()).folder).eval())
    assert weights is not None
    return PackedGpuEngine(weights, [Pooling(SHAPES[shape].hidden, "mean")], gpu, dtype, MAX_TOKENS)


def _device_s(work: Callable[[], object], gpu: Gpu, cpu: bool) -> float:
    """The median time that the device takes for some work (seconds). The host must queue it within 20 ms."""
    for _ in range(_WARM_UPS):
        work()
    gpu.synchronize()
    return median(seconds_of(work) if cpu else _once_s(work) for _ in range(_ROUNDS))


def _once_s(work: Callable[[], object]) -> float:
    cuda: Any = torch.cuda  # torch has no types for its events
    began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    # While the device is busy with this, the host queues all of the work: its own time is not part of the device's.
    cuda._sleep(_HEAD_START_CYCLES)
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def _host_s(work: Callable[[], object], gpu: Gpu) -> float:
    """The median time until some work is queued on an idle device (seconds). On the CPU, until it is done."""
    taken = []
    for _ in range(_ROUNDS):
        gpu.synchronize()
        taken.append(seconds_of(work))
    gpu.synchronize()
    return median(taken)
