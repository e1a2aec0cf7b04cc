"""The floor: a model's matrix products alone, without a token of padding, by the fastest product that torch has.

No engine of the same precision can be faster unless its products are faster. Attention's products are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from .serving import Vectors

Product = Callable[[torch.Tensor], torch.Tensor]

#: Layers, hidden size and inner size of a feed-forward block: BERT's names, and DistilBERT's.
_SIZES = (("num_hidden_layers", "n_layers"), ("hidden_size", "dim"), ("intermediate_size", "hidden_dim"))


class FloorAdapter:
    """All tokens of all texts through every layer's weights, at most `budget` at a time; there are no vectors."""

    def __init__(self, model: Path, threads: int, product: str, budget: int) -> None:
        torch.set_num_threads(threads)
        config = json.loads((model / "config.json").read_text())
        layers, hidden, inner = (config.get(bert) or config[distilbert] for bert, distilbert in _SIZES)
        shapes = [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
        make = {"mm": _mm, "prepacked": _prepacked}[product]
        # Each layer has weights of its own, as in a model, so that they don't all stay in the CPU's cache.
        self._products = [(make(torch.randn(shape), budget), shape[1]) for _ in range(layers) for shape in shapes]
        self._inputs = {width: torch.randn(budget, width) for width in (hidden, inner)}
        self._budget = budget
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._counts: dict[tuple[str, ...], int] = {}

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Multiply; return vectors without components."""
        left = self.count(texts)
        with torch.no_grad():
            while left > 0:
                rows = min(left, self._budget)
                for product, width in self._products:
                    product(self._inputs[width][:rows])
                left -= rows
        return np.empty((len(texts), 0), np.float32)

    def count(self, texts: Sequence[str]) -> int:
        """Tokens, counted once: the floor does not include tokenising."""
        key = tuple(texts)
        if key not in self._counts:
            self._counts[key] = sum(len(each.ids) for each in self._tokenizer.encode_batch(list(texts)))
        return self._counts[key]


def _mm(weight: torch.Tensor, rows: int) -> Product:
    transposed = weight.T.contiguous()
    return lambda inputs: torch.mm(inputs, transposed)


def _prepacked(weight: torch.Tensor, rows: int) -> Product:
    """oneDNN's product on weights in its own layout, chosen for this many rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda inputs: torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")
