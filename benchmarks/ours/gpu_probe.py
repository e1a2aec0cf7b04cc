"""The probe of a GPU: what it makes of single batches of the engine for packed tokens, on random weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import BertConfig, BertModel

from embedctl_bench.peers.models import MAX_TOKENS, SHAPES
from embedctl_workers.arrays.tokens import Ragged, Tokens
from embedctl_workers.backends.gpu.device import Gpu, open_gpu
from embedctl_workers.backends.gpu.packed import PackedGpuEngine
from embedctl_workers.backends.gpu.precision import full_precision
from embedctl_workers.backends.torch.packed.weights import weights_of
from embedctl_workers.measuring.flops import EncoderShape

_WARM_UPS, _ROUNDS, _REPEATS = 3, 10, 20
#: Of the device's clock: some 20 ms.
_HEAD_START_CYCLES = 40_000_000
#: Lengths of W1's texts.
_MEDIAN, _SIGMA, _SHORTEST, _LONGEST = 26, 0.914, 8, 256


def gpu_batch(shape: str, tokens: int, length: int, *, cpu: bool) -> dict[str, float]:
    """A batch of a model's shape: ms of the device, and of the host to pack it and to begin it; and the device's rate.

    Texts have W1's lengths, or all the same. That the host waits for the device nowhere in a batch is checked, and that
    vectors stay the same. With cpu, the CPU stands in for a GPU, to see that the code works.
    """
    # All that the engine asks of a device, apart from tensors on it.
    stand_in = SimpleNamespace(device=torch.device("cpu"), name="CPU", varlen=False, synchronize=lambda: None)
    gpu = cast(Gpu, stand_in) if cpu else open_gpu()
    full_precision()
    size = SHAPES[shape]
    lengths = np.full(-(-tokens // length), length) if length else _mixed(tokens)
    with torch.inference_mode():
        engine = _engine(shape, gpu, torch.float32 if cpu else torch.bfloat16)
        ids = [np.arange(1000 + at, 1000 + at + each).tolist() for at, each in enumerate(lengths)]
        texts = Tokens(lengths, np.zeros_like(lengths), {"input_ids": Ragged.of(ids)})
        rows = np.arange(len(lengths))
        batch = engine.batch(texts, rows)
        arrays = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.arrays.items()}
        inputs = {name: array.to(gpu.device, torch.int32) for name, array in arrays.items()}

        def run() -> torch.Tensor:
            return engine.run(inputs, batch.facts)

        first = run().clone()
        worst = max(float((run() - first).abs().max()) for _ in range(_REPEATS))
        if not cpu:
            gpu.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        side = 256 if cpu else 8192
        square = torch.randn(side, side, device=gpu.device, dtype=torch.bfloat16)
        ceiling = 2 * side**3 / _device_ms(lambda: square @ square, gpu, cpu) / 1e9
        device_ms = _device_ms(run, gpu, cpu)
        flop = EncoderShape(size.hidden, 4 * size.hidden, size.layers).flop(lengths)
        return {
            "device ms": device_ms,
            "host ms to pack": _host_ms(lambda: engine.batch(texts, rows), gpu),
            "host ms to begin": _host_ms(run, gpu),
            "Mtok/s": int(lengths.sum()) / device_ms / 1e3,
            "TFLOP/s": flop / device_ms / 1e9,
            "TFLOP/s of a large product in bf16": ceiling,
            "off by, when repeated": worst,
        }


def _mixed(tokens: int) -> np.ndarray[Any, Any]:
    drawn = np.exp(np.random.default_rng(0).normal(np.log(_MEDIAN), _SIGMA, -(-tokens // _SHORTEST)))
    lengths = drawn.astype(np.int64).clip(_SHORTEST, _LONGEST)
    return lengths[: int(np.searchsorted(lengths.cumsum(), tokens)) + 1]


def _engine(shape: str, gpu: Gpu, dtype: torch.dtype) -> PackedGpuEngine:
    torch.manual_seed(0)
    size = SHAPES[shape]
    config = BertConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=MAX_TOKENS,
    )
    weights = weights_of(BertModel(config).train(False))
    assert weights is not None
    return PackedGpuEngine(weights, [Pooling(size.hidden, "mean")], gpu, dtype, MAX_TOKENS)


def _device_ms(work: Callable[[], object], gpu: Gpu, cpu: bool) -> float:
    """The median time that the device takes for some work, in ms. The host must queue it within 20 ms."""
    for _ in range(_WARM_UPS):
        work()
    gpu.synchronize()
    return median(_wall_ms(work) if cpu else _once_ms(work) for _ in range(_ROUNDS))


def _once_ms(work: Callable[[], object]) -> float:
    cuda: Any = torch.cuda  # torch has no types for its events
    began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    # While the device is busy with this, the host queues all of the work: its own time is not part of the device's.
    cuda._sleep(_HEAD_START_CYCLES)
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def _host_ms(work: Callable[[], object], gpu: Gpu) -> float:
    """The median time until some work is queued on an idle device, in ms. On the CPU, until it is done."""
    taken = []
    for _ in range(_ROUNDS):
        gpu.synchronize()
        taken.append(_wall_ms(work))
    gpu.synchronize()
    return median(taken)


def _wall_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3
