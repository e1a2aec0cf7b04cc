"""The floor of a precision: a model's matrix products alone, without padding, by the fastest product that torch has.

An engine of the same precision is faster only if its products are. Attention's products are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from embedctl_config.hardware import SHIPPED_CLASSES
from embedctl_workers.measuring.cpu_products import PRODUCTS, missing
from embedctl_workers.measuring.matrix_products import matrix_products
from embedctl_workers.measuring.short_benchmark import shape_of

from .serving import Answer, Vectors
from .tokens import TokenCounter

#: How long the device's products are measured (seconds).
_MATRIX_S = 1.0


class FloorAdapter:
    """All tokens of all texts through every layer's weights, at most `budget` at a time; there are no vectors."""

    def __init__(self, model: Path, threads: int, product: str, budget: int, kind: str = "fp32") -> None:
        if why := missing(kind):
            raise RuntimeError(why)
        torch.set_num_threads(threads)
        self.computes = kind
        size = shape_of(model)
        if size is None:
            raise RuntimeError("the model is of an unknown shape")
        hidden, inner = size.hidden, size.inner
        shapes = [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
        way = PRODUCTS[kind][product]
        # Each layer has weights of its own, as in a model, so that they don't all stay in the CPU's cache.
        with torch.inference_mode():
            self._products = [(way.prepare(*shape, budget), shape[1]) for _ in range(size.layers) for shape in shapes]
            self._inputs = {width: way.source(budget, width) for width in (hidden, inner)}
        self._budget = budget
        self._counter = TokenCounter(model)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Multiply; return vectors without components."""
        left = self.count(texts)
        with torch.inference_mode():
            while left > 0:
                rows = min(left, self._budget)
                for product, width in self._products:
                    product(self._inputs[width][:rows])
                left -= rows
        return np.empty((len(texts), 0), np.float32)

    def count(self, texts: Sequence[str]) -> int:
        """Tokens, counted once: the floor does not include tokenising."""
        return sum(self._counter.lengths(texts))


class MatrixAdapter:
    """The device's products alone, as `embedctl model verify` measures them.

    Its seconds are computed: those of the texts' operations at the device's matrix rate. It makes no vectors.
    """

    def __init__(self, model: Path, threads: int, hardware: str) -> None:
        products, shape = matrix_products(SHIPPED_CLASSES[hardware], threads), shape_of(model)
        if isinstance(products, str) or shape is None:
            raise RuntimeError(f"no matrix rate: {products if shape else 'the model is of an unknown shape'}")
        self._products, self._shape = products, shape
        self._counter = TokenCounter(model)

    def encode(self, texts: Sequence[str]) -> Answer:
        """Multiply for a second; every token of the texts counts."""
        lengths = np.array(self._counter.lengths(texts))
        seconds = self._shape.flop(lengths) / self._products.rate(_MATRIX_S)
        return Answer(np.empty((len(texts), 0), np.float32), 0.0, seconds, int(lengths.sum()))
