"""The floor of a precision: a model's matrix products alone, without padding, by the fastest product that torch has.

An engine of the same precision is faster only if its products are. Attention's products are left out, unless they are
asked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from embedctl_workers.models.fastest import fastest, timed

from .products import PRODUCTS, CpuProduct, check
from .serving import Answer, Vectors
from .shape import EncoderShape, shape_of
from .tokens import TokenCounter

#: Rows, and rows and columns of the matrix, of a GPU's products.
_ON_GPU = 8192
#: How long they are measured, and the shortest work between two waits (seconds): after a wait, the GPU idles until it
#: gets more work.
_MATRIX_S, _AT_LEAST_S = 1.0, 0.05


class FloorAdapter:
    """All tokens of all texts through every layer's weights, at most `budget` at a time; there are no vectors.

    With `attention`, in fp32, also each text's products of queries and keys, and of weights and values.
    """

    def __init__(
        self, model: Path, threads: int, product: str, budget: int, kind: str = "fp32", *, attention: bool = False
    ) -> None:
        check(kind)
        torch.set_num_threads(threads)
        self.computes = kind
        size = shape_of(model)
        hidden, inner = size.hidden, size.inner
        shapes = [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
        way = PRODUCTS[kind][product]
        # Each layer has weights of its own, as in a model, so that they don't all stay in the CPU's cache.
        with torch.inference_mode():
            self._products = [(way.prepare(*shape, budget), shape[1]) for _ in range(size.layers) for shape in shapes]
            self._inputs = {width: way.source(budget, width) for width in (hidden, inner)}
        self._attending = lru_cache(None)(lambda length: _attending(size, way, length)) if attention else None
        self._layers, self._budget = size.layers, budget
        self._counter = TokenCounter(model)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Multiply; return vectors without components."""
        lengths = self._counter.lengths(texts)
        left = sum(lengths)
        with torch.inference_mode():
            while left > 0:
                rows = min(left, self._budget)
                for product, width in self._products:
                    product(self._inputs[width][:rows])
                left -= rows
            if self._attending:
                for length, count in Counter(lengths).items():
                    _repeat(self._attending(length), count * self._layers)
        return np.empty((len(texts), 0), np.float32)

    def count(self, texts: Sequence[str]) -> int:
        """Tokens, counted once: the floor does not include tokenising."""
        return sum(self._counter.lengths(texts))


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def _attending(size: EncoderShape, way: CpuProduct, length: int) -> Callable[[], object]:
    """The products of attention over a text of this length in one layer: of all heads at once, or of each by this way,
    whichever is faster."""
    heads, head = size.heads, size.hidden // size.heads
    queries, keys, values = (torch.randn(heads, *each) for each in ((length, head), (head, length), (length, head)))
    query, weight = way.source(length, head), way.source(length, length)
    scores, sums = way.prepare(length, head, length), way.prepare(head, length, length)

    def at_once() -> None:
        torch.bmm(torch.bmm(queries, keys), values)

    def each() -> None:
        for _ in range(heads):
            scores(query)
            sums(weight)

    ways: dict[str, Callable[[], object]] = {"at once": at_once, "each": each}
    return ways[fastest({name: [timed(run, time.process_time)] for name, run in ways.items()}).name]


class MatrixAdapter:
    """A GPU's products alone, in 16 bits: large ones, by torch.

    Its seconds are computed: those of the texts' operations at the rate of these products. It makes no vectors.
    """

    def __init__(self, model: Path, threads: int) -> None:
        # NVIDIA's GPUs before Ampere do not multiply in bf16 in hardware.
        has_bf16 = torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 0)
        kind = torch.bfloat16 if has_bf16 else torch.float16
        # Random values: with zeros, a GPU draws less power and is faster.
        weight, x = (torch.randn(_ON_GPU, _ON_GPU, device="cuda", dtype=kind) for _ in range(2))
        self._multiply = partial(torch.mm, x, weight, out=torch.empty_like(x))
        self._shape = shape_of(model)
        self._counter = TokenCounter(model)

    def encode(self, texts: Sequence[str]) -> Answer:
        """Multiply for a second; every token of the texts counts."""
        lengths = self._counter.lengths(texts)
        flop_per_s = 2.0 * _ON_GPU**3 * products_per_s(self._multiply, torch.cuda.synchronize)
        return Answer(np.empty((len(texts), 0), np.float32), 0.0, self._shape.flop(lengths) / flop_per_s, sum(lengths))


def products_per_s(
    multiply: Callable[[], object], wait: Callable[[], object], now: Callable[[], float] = time.perf_counter
) -> float:
    """How often a GPU does what `multiply` begins, by the clock `now`; `wait` waits for all that was begun."""
    multiply()
    wait()
    done, at_once = 0, 1
    started = before = now()
    while before - started < _MATRIX_S:
        _repeat(multiply, at_once)
        wait()
        done += at_once
        after = now()
        if after - before < _AT_LEAST_S:
            at_once *= 2
        before = after
    return done / (before - started)
