"""What the device can do at best."""

from __future__ import annotations

from functools import partial

import torch
from benchmarks.ours.gpu_probe.device import Probed
from torch.nn import functional

from embedctl_bench.measuring.shapes import ModelShape


def ceilings(probed: Probed) -> None:
    """a copy, a large product, and each product of each model with its bias"""
    size = 1 << (20 if probed.trial else 31)
    source = torch.zeros(size, dtype=torch.uint8, device=probed.device)
    target = torch.empty_like(source)
    print(f"copy: {2 * size / probed.device_ms(partial(target.copy_, source)) / 1e9:.2f} TB/s")
    del source, target
    side = 256 if probed.trial else 8192
    a, b = probed.randn(side, side), probed.randn(side, side)
    top = _tflops(2 * side**3, probed.device_ms(partial(torch.matmul, a, b)))
    print(f"product of {side}³: {top:.1f} TFLOP/s", flush=True)
    for name, shape in probed.shapes.items():
        _products(name, shape, probed, top)


def _products(name: str, shape: ModelShape, probed: Probed, top: float) -> None:
    tokens, hidden, inner = probed.tokens, shape.hidden, 4 * shape.hidden
    products = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden), "up": (hidden, inner), "down": (inner, hidden)}
    operations, taken = 0, 0.0
    for what, (width, rows) in products.items():
        x, weight, bias = probed.randn(tokens, width), probed.randn(rows, width), probed.randn(rows)
        ms = probed.device_ms(partial(functional.linear, x, weight, bias))
        operations, taken = operations + 2 * tokens * width * rows, taken + ms
        rate = _tflops(2 * tokens * width * rows, ms)
        gelu = _with_gelu(x, weight, bias, probed) if what == "up" else ""
        print(f"{name} {what} {tokens}×{width}→{rows}: {ms:.3f} ms, {rate:.1f} TFLOP/s{gelu}", flush=True)
    x, weight = probed.randn(tokens, hidden), probed.randn(hidden)
    norm = probed.device_ms(lambda: functional.layer_norm(x + x, (hidden,), weight, weight))
    print(f"{name}: products at {_tflops(operations, taken) / top:.2f} of the large one's rate", end="; ")
    print(f"add and LayerNorm {norm:.3f} ms, twice a layer", flush=True)


def _with_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, probed: Probed) -> str:
    """The time with GELU behind the product, and with the approximate one in the same kernel."""
    behind = probed.device_ms(lambda: functional.gelu(functional.linear(x, weight, bias)))
    fused = probed.device_ms(lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True))
    return f"; with GELU {behind:.3f} ms, with its tanh form fused {fused:.3f} ms"


def _tflops(operations: int, ms: float) -> float:
    return operations / ms / 1e9
