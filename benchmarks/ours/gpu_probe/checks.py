"""Whether the engine does what it promises on a real device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from benchmarks.ours.gpu_probe.batches import engine_of
from benchmarks.ours.gpu_probe.device import Probed
from benchmarks.ours.gpu_probe.lengths import lengths_of
from benchmarks.ours.gpu_probe.whole import Run, eager
from torch.nn.functional import cosine_similarity

_TIMES = 50
_TOKENS = 8192
#: Pooling adds in any order, which changes the last digits of float32 alone.
_LEAST_COSINE = 0.99999


class WrongVectorsError(Exception):
    """Raised if a batch got other vectors than before."""


def waits(probed: Probed) -> None:
    """the host waits for the device nowhere in a batch"""
    run = _runs(probed, 1)[0]
    run()
    if probed.trial:
        print("needs a GPU")
        return
    probed.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print("nowhere")


def repeats(probed: Probed) -> None:
    """the same vectors again and again"""
    run = _runs(probed, 1)[0]
    print(_worst(run, run().clone(), probed))


def threads(probed: Probed) -> None:
    """the same vectors from two threads at once, each with a batch of its own"""
    runs = _runs(probed, 2)
    expected = [run().clone() for run in runs]
    probed.synchronize()
    with ThreadPoolExecutor(len(runs)) as pool:
        for line in pool.map(_worst, runs, expected, [probed] * len(runs)):
            print(line)


def _runs(probed: Probed, count: int) -> list[Run]:
    """What runs batches of different texts, on one engine of the smallest model."""
    engine = engine_of(next(iter(probed.shapes.values())), probed)
    return [eager(engine, lengths_of("W1", min(_TOKENS, probed.tokens), seed), probed) for seed in range(count)]


def _worst(run: Run, expected: torch.Tensor, probed: Probed) -> str:
    """The largest difference of many runs, in words.

    Raises:
        WrongVectorsError: it is more than rounding.
    """
    # Each thread needs its own: the setting does not reach threads that a block starts.
    with torch.inference_mode():
        found = [run() for _ in range(5 if probed.trial else _TIMES)]
        error = max((each - expected).abs().max().item() for each in found)
        cosine = min(cosine_similarity(each, expected).min().item() for each in found)
    if not cosine >= _LEAST_COSINE:
        raise WrongVectorsError(f"a vector has the cosine {cosine:.6f} with its first value, off by {error:.1e}")
    return f"{len(found)} times: off by {error:.1e}, least cosine {cosine:.7f}"
