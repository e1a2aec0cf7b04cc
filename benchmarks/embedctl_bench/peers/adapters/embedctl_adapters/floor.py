"""The floor of a precision: a model's matrix products alone, without padding, by the fastest product that torch has.

An engine of the same precision is faster only if its products are. Attention's products are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from embedctl_workers.measuring.cpu_products import PRODUCTS, missing

from .serving import Vectors
from .tokens import TokenCounter

#: Layers, hidden size and inner size of a feed-forward block: BERT's names, and DistilBERT's.
_SIZES = (("num_hidden_layers", "n_layers"), ("hidden_size", "dim"), ("intermediate_size", "hidden_dim"))


class FloorAdapter:
    """All tokens of all texts through every layer's weights, at most `budget` at a time; there are no vectors."""

    def __init__(self, model: Path, threads: int, product: str, budget: int, kind: str = "fp32") -> None:
        if why := missing(kind):
            raise RuntimeError(why)
        torch.set_num_threads(threads)
        self.computes = kind
        config = json.loads((model / "config.json").read_text())
        layers, hidden, inner = (config.get(bert) or config[distilbert] for bert, distilbert in _SIZES)
        shapes = [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
        way = PRODUCTS[kind][product]
        # Each layer has weights of its own, as in a model, so that they don't all stay in the CPU's cache.
        with torch.inference_mode():
            self._products = [(way.prepare(*shape, budget), shape[1]) for _ in range(layers) for shape in shapes]
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
