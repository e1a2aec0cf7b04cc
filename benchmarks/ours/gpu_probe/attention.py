"""Attention alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from benchmarks.ours.gpu_probe.device import Probed, wall_ms
from benchmarks.ours.gpu_probe.lengths import WORKLOADS, lengths_of
from torch.nn import functional

from embedctl_bench.measuring.shapes import MAX_TOKENS
from embedctl_workers.arrays.tokens import Rows

#: query, key, value (tokens × heads × size), the texts' ends twice, the longest text twice.
_Varlen = Callable[..., object]
_NEW_SHAPES = 12


def varlen(probed: Probed) -> None:
    """attention over packed texts, with the batch's own maximum, with 512, and with 512 and many empty texts"""
    attend: _Varlen = _stand_in if probed.trial else _of_torch()
    for name, shape in probed.shapes.items():
        qkv = probed.randn(probed.tokens, 3, shape.heads, shape.hidden // shape.heads)
        for workload in WORKLOADS:
            lengths = lengths_of(workload, probed.tokens)
            ends = _ends(lengths, len(lengths), probed)
            filled = _ends(lengths, probed.tokens // 8, probed)
            longest = int(lengths.max())
            own = partial(attend, *qkv.unbind(1), ends, ends, longest, longest)
            own_ms, host_ms = probed.device_ms(own), probed.host_ms(own)
            wide = probed.device_ms(partial(attend, *qkv.unbind(1), ends, ends, MAX_TOKENS, MAX_TOKENS))
            empty = probed.device_ms(partial(attend, *qkv.unbind(1), filled, filled, MAX_TOKENS, MAX_TOKENS))
            print(f"{name} {workload}: {own_ms:.3f} ms (maximum {longest}), {wide:.3f} ms (maximum 512)", end=", ")
            print(f"{empty:.3f} ms ({len(filled) - 1} texts, {len(lengths)} not empty)", end="; ")
            print(f"host {host_ms * 1e3:.0f} µs a call", flush=True)


def cudnn(probed: Probed) -> None:
    """torch's plain attention with a mask, on shapes not seen before, with cuDNN and without: ms of each"""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # torch has no types for it
    try:
        for on in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(on)
            taken = [_first_ms(rows, probed) for rows in range(40, 40 + _NEW_SHAPES)]
            print(f"cuDNN {'on' if on else 'off'}: {' '.join(f'{ms:.1f}' for ms in taken)}", flush=True)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


def _first_ms(rows: int, probed: Probed) -> float:
    q = probed.randn(rows, 12, 64, 64)
    mask = torch.ones(rows, 1, 1, 64, dtype=torch.bool, device=probed.device)

    def attend() -> None:
        functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        probed.synchronize()

    probed.synchronize()
    return wall_ms(attend)


def _ends(lengths: Rows, texts: int, probed: Probed) -> torch.Tensor:
    """The texts' offsets on the device, int32, with empty texts at the end up to this number."""
    ends = np.concatenate([[0], lengths.cumsum()])
    ends = np.pad(ends, (0, max(0, texts + 1 - len(ends))), mode="edge")
    return torch.from_numpy(ends).to(probed.device, torch.int32)


def _of_torch() -> _Varlen:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, *_: object) -> None:
    """The work of torch's varlen_attn, which does not run on the CPU."""
    at: list[int] = ends.tolist()
    for begin, end in pairwise(at):
        if end > begin:
            query, key, value = (each[begin:end].transpose(0, 1) for each in (q, k, v))
            functional.scaled_dot_product_attention(query, key, value)
